"""The compiled row pass of compiled.py; where no C compiler builds it, viper installs and works without it."""

from setuptools import Extension, setup

FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"]
FLAGS += ["-fno-fast-math", "-fno-unsafe-math-optimizations", "-fno-associative-math"]  # whatever CFLAGS say
FLAGS += ["-fvisibility=hidden", "-Wno-psabi"]

setup(ext_modules=[Extension("viper._rows", ["src/viper/_rows.c"], extra_compile_args=FLAGS, optional=True)])
