"""`python -m rheoscope`, which torchrun can start as well."""

from rheoscope.cli.app import main

if __name__ == "__main__":
    main()
