"""ResNet-50 and its weight conversion, against transformers' ResNet with batch norms."""

import pytest
import torch
from transformers import ResNetConfig, ResNetModel

from vitrail.encoders.resnet50 import STAGES, ResNet50
from vitrail.errors import ConfigError, ImageError
from vitrail.hub.lpips_weights import fill_parameters
from vitrail.hub.resnet50_weights import fold_batch_norms


def keras_tensors(seed=0):
    """Random tensors with Keras' names, with nontrivial biases and batch norms."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}

    def add(conv, norm, kernel, inputs, outputs):
        fan = (2 / (kernel * kernel * inputs)) ** 0.5
        tensors[f"{conv}/kernel"] = torch.randn(kernel, kernel, inputs, outputs, generator=generator) * fan
        tensors[f"{conv}/bias"] = torch.randn(outputs, generator=generator) * 0.1
        for part, low in (("gamma", 0.3), ("beta", -0.2), ("moving_mean", -0.2), ("moving_variance", 1e-4)):
            tensors[f"{norm}/{part}"] = torch.rand(outputs, generator=generator) * 0.5 + low

    add("conv1", "bn_conv1", 7, 3, 64)
    inputs = 64
    for stage, (width, blocks) in enumerate(STAGES):
        for block in range(blocks):
            where = f"{stage + 2}{'abcdef'[block]}_branch"
            shapes = {"2a": (1, inputs, width), "2b": (3, width, width), "2c": (1, width, 4 * width)}
            if block == 0:
                shapes["1"] = (1, inputs, 4 * width)
            for branch, shape in shapes.items():
                add(f"res{where}{branch}", f"bn{where}{branch}", *shape)
            inputs = 4 * width
    tensors["fc1000/kernel"] = torch.randn(2048, 1000, generator=generator) * 0.02
    tensors["fc1000/bias"] = torch.randn(1000, generator=generator)
    return tensors


def reference(tensors):
    """transformers' ResNet-50 with the stride in the first 1×1 convolution; biases go to the mean of the norm."""
    model = ResNetModel(ResNetConfig(downsample_in_bottleneck=True)).eval()

    def put(layer, conv, norm):
        with torch.no_grad():
            layer.convolution.weight.copy_(tensors[f"{conv}/kernel"].permute(3, 2, 0, 1))
            layer.normalization.weight.copy_(tensors[f"{norm}/gamma"])
            layer.normalization.bias.copy_(tensors[f"{norm}/beta"])
            layer.normalization.running_mean.copy_(tensors[f"{norm}/moving_mean"] - tensors[f"{conv}/bias"])
            layer.normalization.running_var.copy_(tensors[f"{norm}/moving_variance"])
            layer.normalization.eps = 1.001e-5

    put(model.embedder.embedder, "conv1", "bn_conv1")
    for s, stage in enumerate(model.encoder.stages):
        for b, block in enumerate(stage.layers):
            where = f"{s + 2}{'abcdef'[b]}_branch"
            for layer, branch in zip(block.layer, ("2a", "2b", "2c"), strict=True):
                put(layer, f"res{where}{branch}", f"bn{where}{branch}")
            if b == 0:
                put(block.shortcut, f"res{where}1", f"bn{where}1")
    return model


def test_features_and_logits():
    tensors = keras_tensors()
    ours, theirs = fill_parameters(ResNet50(), fold_batch_norms(tensors)).double(), reference(tensors).double()
    pixels = torch.rand(2, 3, 33, 64).double() * 2 - 1
    blue_first = ((pixels + 1) * 127.5).flip(1) - torch.tensor([103.939, 116.779, 123.68])[:, None, None].double()
    with torch.no_grad():
        wanted = theirs(blue_first)
        maps = ours.forward_features(pixels)
    assert maps.shape == (2, 2048, 2, 2)
    scale = wanted.last_hidden_state.abs().max()
    assert (maps - wanted.last_hidden_state).abs().max() < 1e-5 * scale  # folded weights are rounded to float32
    assert (ours(pixels) - wanted.pooler_output.flatten(1)).abs().max() < 1e-5 * scale
    features = wanted.pooler_output.flatten(1)
    logits = features @ tensors["fc1000/kernel"].double() + tensors["fc1000/bias"].double()
    torch.testing.assert_close(ours.classify(features), logits)


def test_weights_are_frozen_and_pixels_have_gradients():
    network = ResNet50()
    before = network.train()(torch.zeros(1, 3, 32, 32))
    assert not any(p.requires_grad for p in network.parameters()) and not list(network.buffers())
    assert torch.equal(network.eval()(torch.zeros(1, 3, 32, 32)), before)
    pixels = torch.zeros(1, 3, 32, 32, requires_grad=True)
    network(pixels).sum().backward()
    assert pixels.grad.abs().sum() > 0


def test_mismatched_images_raise():
    network = ResNet50()
    for shape in ((1, 3, 31, 64), (1, 4, 64, 64), (3, 64, 64)):
        with pytest.raises(ImageError, match="pixels of ResNet-50"):
            network(torch.zeros(shape))
    with pytest.raises(ImageError, match="in −1…1"):
        network(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="image_size is 31"):
        ResNet50(31)


def test_name_contains_the_image_size():
    assert (ResNet50().name, ResNet50().image_size, ResNet50(96).name) == ("ResNet50", 224, "ResNet50@96")
