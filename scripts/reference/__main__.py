"""Entry point of the generator; `--check` reports outdated pages and changes nothing."""

import sys

from scripts.reference.pages import PAGES, is_up_to_date, rendered


def main() -> int:
    outdated = [page for page in PAGES if not is_up_to_date(page)]
    for page in outdated:
        print(f"{'outdated' if '--check' in sys.argv else 'written'}: {page.name}")
        if "--check" not in sys.argv:
            page.write_text(rendered(page), encoding="utf-8")
    return 1 if outdated and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
