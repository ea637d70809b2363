"""`python -m autosel`: the command line with this Python."""

from autosel.cli.main import main

if __name__ == "__main__":
    main()
