"""``flysurgery inspect``: the linear layers of a model, what each is for, and what stands in the way of replacing it."""

from __future__ import annotations

from flysurgery.cli import options

REPLACEABLE = ("qkv", "attn_out", "ffn_in", "ffn_out")


def inspect(
    model: options.DenseModel,
    model_args: options.ModelArgs = None,
    base: options.Base = None,
    arch: options.Arch = "monarch",
    convs: options.Convs = False,
    as_json: options.Json = False,
) -> None:
    """List a model's linear layers with their roles, weights and obstacles; weights are not needed.

    Shares are those of the model's parameters, and of the FLOPs of all layers listed. What a layer of attention or a feed-forward
    block would be replaced by is told for --arch, without any selection.
    """
    from flysurgery import surgery
    from flysurgery.cli.inspect_report import print_lines, sum_of, weighed
    from flysurgery.cli.source import find_dense
    from flysurgery.cli.tables import print_json
    from flysurgery.errors import PlanError, SelectionError
    from flysurgery.walker import block_names, example_input, positional, walk

    source = find_dense(model, base=base, model_args=model_args)
    network = source.skeleton().model
    example = example_input(network)
    targets = walk(network, example)
    roles = tuple(role for role in REPLACEABLE if any(target.role == role for target in targets))
    try:
        plan = surgery.plan(network, arch, roles=roles, convs=convs, example=example, targets=targets)
        planned = {layer.fqn: layer.architecture for layer in plan.replaced}
    except (PlanError, SelectionError):  # nothing can be replaced, as the obstacles tell
        planned = {}
    samples = surgery.samples_of(positional(network, example))
    lines = [weighed(target, samples, planned) for target in targets]
    total = sum(parameter.numel() for parameter in network.parameters())
    blocks = block_names(targets)
    if as_json:
        print_json({"model": model, "params": total, "linear_flops": sum_of(lines, "flops"), "blocks": list(blocks), "targets": lines})
        return
    print_lines(lines, total, blocks)
