"""Takes the place of SGLang's kernel library, of which there is no CPU build to install.

On CPUs SGLang imports `*_cpu` functions without asking; those that serving these models needs have a torch form that it falls
back to. The rest raise when they are called.
"""

__version__ = "0.0.0"


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(f"this stand-in for sgl_kernel has no {name}")

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs the CPU build of sgl_kernel")

    return absent
