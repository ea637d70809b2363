"""`python -m autosel`: the command line of the Python that runs it."""

from autosel.cli.main import main

if __name__ == "__main__":
    main()
