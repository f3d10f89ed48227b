"""The compiled row pass of compiled.py; where no C compiler builds it, viper installs and works without it."""

from setuptools import Extension, setup

FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"]
FLAGS += ["-fno-fast-math", "-fno-unsafe-math-optimizations", "-fno-associative-math"]  # whatever CFLAGS say
FLAGS += ["-fvisibility=hidden", "-Wno-psabi", "-pthread"]

PLACE = "viper.inference.kernels._rows"
SOURCE = "src/viper/inference/kernels/_rows.c"
setup(ext_modules=[Extension(PLACE, [SOURCE], extra_compile_args=FLAGS, extra_link_args=["-pthread"], optional=True)])
