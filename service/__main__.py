"""`python -m service` is `coppice`."""

from service.entry import main

if __name__ == "__main__":
    main()
