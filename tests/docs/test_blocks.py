"""The execution of documentation blocks: what is refused, and what fails."""

import sysconfig
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.docs.blocks import blocks, problems
from tests.docs.conftest import last_block, run_page

PAGE = """# A page

<!-- run: shell -->
```bash
word=first
mkdir -p folder && cd folder
```

<!-- run: shell -->
```python
number = 41
```

<!-- run: shell -->
```bash
test "$word" = first
test "$(basename "$PWD")" = folder
```

<!-- run: shell -->
```python
assert number + 1 == 42
{last}
```
"""


@pytest.mark.slow
def test_blocks_of_a_page_share_variables_and_names(tree: Path, tmp_path: Path) -> None:
    page = blocks("page.md", PAGE.format(last=""))
    succeeded, log = run_page(page, "127.0.0.1:1", tree, tmp_path)
    assert succeeded, log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("raise KeyError('one')", 'File "page.md", line 23'),
        ("import sys; sys.exit(3)", "page.md:21"),
    ],
)
def test_failing_block_is_named(tree: Path, tmp_path: Path, last: str, message: str) -> None:
    page = blocks("page.md", PAGE.format(last=last))
    succeeded, log = run_page(page, "127.0.0.1:1", tree, tmp_path)
    assert not succeeded
    assert message in last_block(log)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["false", "false | true", "echo $undefined"])
def test_failing_command_fails_its_page(tree: Path, tmp_path: Path, command: str) -> None:
    page = blocks("page.md", f"<!-- run: shell -->\n```bash\n{command}\necho done\n```\n")
    succeeded, log = run_page(page, "127.0.0.1:1", tree, tmp_path)
    assert not succeeded and "done" not in log.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("path", "succeeds"), [("README.md", True), ("missing", False)])
def test_http_error_fails_its_page(tree: Path, tmp_path: Path, path: str, succeeds: bool) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(tree))
    text = f"<!-- run: server -->\n```bash\ncurl -s http://127.0.0.1:8000/{path} | cat\n```\n"
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        address = f"127.0.0.1:{server.server_port}"
        assert run_page(blocks("page.md", text), address, tree, tmp_path)[0] == succeeds
        server.shutdown()


@pytest.mark.slow
def test_packages_are_installed_beside_the_checkouts(tree: Path, tmp_path: Path) -> None:
    text = "<!-- run: shell -->\n```bash\npip install --quiet ./client\n```\n"
    before = sorted(Path(sysconfig.get_path("purelib")).iterdir())
    succeeded, log = run_page(blocks("page.md", text), "127.0.0.1:1", tree, tmp_path)
    assert succeeded, log
    assert list(tree.glob(".venv/lib/python*/site-packages/coppice_client-*.dist-info"))
    assert sorted(Path(sysconfig.get_path("purelib")).iterdir()) == before


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("```bash\ntrue\n```", "no marker"),
        ("text\n```python\npass\n```", "no marker"),
        ("<!-- run: server -->\n\n```bash\ntrue\n```", "no marker"),
        ("- a list\n\n    ```bash\n    true\n    ```", "no marker"),
        ("```sh\ntrue\n```", "instead of ```sh"),
        ("<!-- run: nowhere -->\n```bash\ntrue\n```", "unknown marker"),
        ("<!-- ran: shell -->\n```text\ntrue\n```", "unknown marker"),
        ("<!-- run: settings -->\n```bash\ntrue\n```", "does not fit"),
        ("<!-- run: shell -->\n```python\nif a:\n    b\nc\n```", "cannot be pasted"),
        ("<!-- run: shell -->\n```python\nif a:\n    b\n\n    c\n```", "cannot be pasted"),
        ("<!-- run: shell -->\n```yaml\na: 1\n```", "does not fit"),
        ("<!-- not run: boring -->\n```bash\ntrue\n```", "not a reason"),
        ("<!-- tested by: tests/docs/test_commands.py -->\n```bash\ntrue\n```", "no such test"),
        ("<!-- tested by: tests/test_no.py::test_a -->\n```bash\ntrue\n```", "no such test"),
        ("<!-- tested by: tests/ports.py::free_port -->\n```bash\ntrue\n```", "no such test"),
    ],
)
def test_invalid_block_is_refused(block: str, problem: str) -> None:
    [parsed] = blocks("page.md", block)
    assert [problem in text for text in problems(parsed)].count(True) == 1


@pytest.mark.parametrize(
    "marker",
    [
        "run: server",
        "not run: needs a Kubernetes cluster",
        "not run: takes 25 minutes",
        "tested by: tests/docs/test_blocks.py::test_valid_marker_is_accepted[run]",
    ],
)
def test_valid_marker_is_accepted(marker: str) -> None:
    [block] = blocks("page.md", f"text\n\n<!-- {marker} -->\n```bash\ntrue\n```\n")
    assert not list(problems(block))
    assert block.place == "page.md:4 (bash: true)"
