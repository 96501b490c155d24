"""``python -m narrowfuzz.cli``: as ``python -m narrowfuzz``."""

from narrowfuzz.cli import main

if __name__ == "__main__":
    main()
