"""Image and video codecs: autoencoders, bit packing and token files. Quantizers are in `vitrail.codecs.quantizers`."""

from vitrail.lazy_imports import lazy_imports

__getattr__, __dir__, __all__ = lazy_imports(__name__, __file__)
