"""`python -m viper`, the same as `viper`."""

from viper.cli import main

if __name__ == "__main__":
    main()
