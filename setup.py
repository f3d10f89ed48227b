"""The compiled row pass and log-sum-exp; where no C compiler builds them, viper installs and works without them."""

import platform

from setuptools import Extension, setup

FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"]
FLAGS += ["-fno-fast-math", "-fno-unsafe-math-optimizations", "-fno-associative-math"]  # whatever CFLAGS say
FLAGS += ["-fvisibility=hidden", "-Wno-psabi", "-pthread"]

HEADER = "src/viper/softplus/_vectors.h"
WIDE = ["inference/kernels/_rows", "softplus/_classes"]  # built a second time, with AVX-512
SOURCES = [*(f"{name}.c" for name in WIDE), "decisions/_arms.c"]
if platform.machine() in ("x86_64", "AMD64"):
    SOURCES += [f"{name}_512.c" for name in WIDE]


def extension(source: str) -> Extension:
    place, path = "viper." + source.removesuffix(".c").replace("/", "."), f"src/viper/{source}"
    links = {"libraries": ["m"], "extra_link_args": ["-pthread"]}
    included = [HEADER, *([path.replace("_512", "")] if "_512" in source else [])]
    return Extension(place, [path], depends=included, extra_compile_args=FLAGS, optional=True, **links)


setup(ext_modules=[extension(source) for source in SOURCES])
