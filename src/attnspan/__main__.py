"""`python -m attnspan` is the command `attnspan`."""

from attnspan.cli import main

if __name__ == "__main__":
    main()
