"""Writes docs/ops.md from the tables of ops: ``python tests/ops_page.py``. A test checks that it is current."""

import pathlib

from torch_dtensor_rng import _composed, _ops

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "ops.md"

_HEAD = """\
# Random ops on DTensors

Generated from `torch_dtensor_rng/_ops.py` by `python tests/ops_page.py`. Every overload of `torch.ops.aten` that torch
2.11 to 2.15 tags as random (`nondeterministic_seeded`) is in one of these tables; a test fails on one that is not.

- In place: fills its first argument, which keeps its placements; a `Partial` one is a `RuntimeError`.
- Reads its input: a `Partial` input is reduced to `Replicate` first, which communicates. Where an op only takes the
  shape of its input, a `Partial` one gives a `Replicate` result, and nothing is reduced.
- Further tensor arguments are brought to the placements of the first one, which communicates where they differ. A plain
  tensor among them has to be a scalar, except under `implicit_replication()`.
- Span: the distance between shards, in offsets of a Philox generator, is never less than the local op can touch: a
  function of the number of values it draws, and where one is named here, at least that. The CPU needs none.
- Exact: under policy `single_device` the numbers are those of one device, whatever the sharding. The others draw as under
  policy `offset` there, with a warning, or raise (`strict=True`). A replicated DTensor always draws what the plain call
  draws.

## Drawn shard by shard

| op | outputs placed | in place | reads its input | tensor arguments | span at least | exact |
| --- | --- | --- | --- | --- | --- | --- |
"""


def _yes(value: bool) -> str:
    return "yes" if value else ""


def render() -> str:
    lines = [_HEAD.rstrip("\n")]
    for row in _ops.TABLE:
        cells = (
            f"`{row.overload}`",
            row.placed.value,
            _yes(row.in_place),
            _yes(row.reads_input),
            "" if row.tensors == 1 else str(row.tensors),
            str(row.least_span or ""),
            _yes(row.fill is not None),
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Attention (`_scaled_dot_product_*`) is drawn shard by shard where its dropout is above 0, and runs by torch's own",
        "path where it is 0. A shard's place takes a value for each score: batch times heads times query length times key",
        "length of the shard. The backward pass reads the seed and offset that the forward pass kept.",
        "",
        "## Made of others on DTensors",
        "",
        "`normal` with tensors does not look for a standard deviation below zero, which would take a collective.",
        "",
        *(f"- `{name}`" for name in _composed.COMPOSED),
        "",
        "## Decomposed",
        "",
        "Torch makes these of other ops before a DTensor sees them; under `inference_mode` the package does.",
        "",
        *(f"- `{name}`" for name in _ops.DECOMPOSED),
        "",
        "## Refused",
        "",
        "A `NotImplementedError` that names the op and the way out.",
        "",
        "| op | the way out |",
        "| --- | --- |",
        *(f"| `{name}` | {way_out} |" for name, way_out in _ops.REFUSED.items()),
        "",
        "## Left to torch",
        "",
        "| op | why |",
        "| --- | --- |",
        *(f"| `{name}` | {reason} |" for name, reason in _ops.OUT_OF_SCOPE.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
