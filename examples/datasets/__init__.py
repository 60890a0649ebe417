"""The image data sets of the examples: scikit-learn's digits, CIFAR-10 and MNIST."""

from .images import IMAGE_SETS, ImageData, default_data_root, load_images

__all__ = ["IMAGE_SETS", "ImageData", "default_data_root", "load_images"]
