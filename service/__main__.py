"""Entry point of `python -m service`, equivalent to the `coppice` command."""

from service.entry import main

if __name__ == "__main__":
    main()
