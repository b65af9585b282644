"""`python -m service` is `coppice`."""

from service.cli import main

if __name__ == "__main__":
    main()
