"""``flysurgery evaluate``: a model's accuracy, or its fidelity to another model, which needs no labels."""

from dataclasses import asdict
from typing import Annotated

from flysurgery.cli import options
from flysurgery.errors import OptionError
from flysurgery.tables import blocks_of_text, text_table

DATA_HELP = "The digits, generated fractals, or a folder with one folder of images a class; with --against any folder of images."
AGAINST_HELP = (
    "Measure the fidelity to this model, any form of MODEL, not the accuracy. "
    "Where MODEL is a folder, --model-args, --base and --checkpoint are this one's."
)
SAMPLES_HELP = "With --against: how many images; by default 512, or as many as there are."
NUMBERS = ("top-1", "top-5", "samples", "seconds")


def evaluate(
    model: options.Model,
    data: Annotated[str, options.option(options.MEASUREMENT, "--data", DATA_HELP, options.DATA)],
    against: Annotated[str | None, options.option(options.MEASUREMENT, "--against", AGAINST_HELP, "MODEL")] = None,
    samples: Annotated[int | None, options.option(options.MEASUREMENT, "--samples", SAMPLES_HELP, "N", 2)] = None,
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
    """Measure a model's top-1 and top-5 accuracy, or with --against how close its outputs are to another model's."""
    from flysurgery import evaluation, inference
    from flysurgery.cli.source import find_pair
    from flysurgery.cli.tables import show, tell_skipped
    from flysurgery.surgery import as_json as json_of
    from flysurgery.surgery import block_errors, measures

    if against is None and samples is not None:
        raise OptionError("--samples goes with --against MODEL; accuracy is measured on all images")
    if against is not None and optimize:
        raise OptionError("--optimize fuses the blocks that --against compares; leave one of the two out")
    source, other = find_pair(model, against, base=base, model_args=model_args, checkpoint=checkpoint)
    target = options.device_of(device)
    source.check_weights(pretrained=pretrained)
    if other is not None:
        other.check_weights(pretrained=pretrained)
    network = source.build(pretrained=pretrained, seed=seed, device=target)
    if other is None:
        if optimize:
            inference.optimize(network.eval())
        accuracy = evaluation.evaluate(network, evaluation.load_data(data, network), batch_size=batch_size, device=target)
        row = (model, f"{accuracy.top1:.2%}", f"{accuracy.top5:.2%}", str(accuracy.samples), f"{accuracy.seconds:.1f}")
        table = text_table(("model", *NUMBERS), [row], right=NUMBERS)
        show({"model": model, "data": data} | asdict(accuracy), table, as_json=as_json)
        return
    teacher = other.build(pretrained=pretrained, seed=seed, device=target)
    evaluation.check_comparable(network, teacher)
    images = tell_skipped(evaluation.load_unseen(data, teacher, samples=samples))
    fidelity = evaluation.compare(network, teacher, images, batch_size=batch_size)
    table = text_table(("fidelity", "value"), [*measures(vars(fidelity)), ("samples", str(fidelity.samples))], right=("value",))
    document = {"model": model, "against": against, "data": data} | json_of(fidelity)
    show(document, blocks_of_text(table, block_errors(fidelity)), as_json=as_json)
