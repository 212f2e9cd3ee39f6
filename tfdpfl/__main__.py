"""`python -m tfdpfl`: the command line."""

from tfdpfl.cli import main

if __name__ == "__main__":
    main(prog_name="tfdpfl")
