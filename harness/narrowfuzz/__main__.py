"""``python -m narrowfuzz``: the command line, run by this Python."""

from narrowfuzz.cli import main

if __name__ == "__main__":
    main()
