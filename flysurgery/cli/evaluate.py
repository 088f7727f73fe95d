"""``flysurgery evaluate``: top-1 and top-5 accuracy of a model, converted or not."""

from __future__ import annotations

from dataclasses import asdict

from flysurgery import inference
from flysurgery.cli import options
from flysurgery.cli.source import find
from flysurgery.cli.tables import print_json, print_table
from flysurgery.evaluation import evaluate as measure
from flysurgery.evaluation import load_data


def evaluate(
    model: options.Model,
    data: options.Data,
    model_args: options.ModelArgs = None,
    base: options.Base = None,
    checkpoint: options.Checkpoint = None,
    pretrained: options.Pretrained = True,
    batch_size: options.BatchSize = 64,
    device: options.Device = None,
    seed: options.Seed = 0,
    optimize: options.Optimize = False,
    as_json: options.Json = False,
) -> None:
    """Measure a model's top-1 and top-5 accuracy."""
    source = find(model, base=base, model_args=options.model_arguments(model_args), checkpoint=checkpoint)
    target = options.device_of(device)
    source.check_weights(pretrained=pretrained)
    network = source.build(pretrained=pretrained, seed=seed, device=target)
    if optimize:
        inference.optimize(network.eval())
    accuracy = measure(network, load_data(data, network), batch_size=batch_size, device=target)
    if as_json:
        print_json({"model": model, "data": data} | asdict(accuracy))
        return
    row = (model, f"{accuracy.top1:.2%}", f"{accuracy.top5:.2%}", str(accuracy.samples), f"{accuracy.seconds:.1f}")
    print_table(("model", "top-1", "top-5", "samples", "seconds"), [row], right=("top-1", "top-5", "samples", "seconds"))
