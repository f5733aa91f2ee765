"""Time and memory of attn_mask and attn_bias, beside PyTorch's memory-efficient SDPA and compiled FlexAttention.

    python tests/wheel/bench_masks.py --json masks.json

The variants alternate in one process on the same random tensors, as in bench.py, whose measure this uses: medians of
CUDA events in milliseconds, and what a call allocates above its inputs. A competitor that raises is reported with its
message. Each ratio is a variant's time over ours with the same mask or bias; "no mask" and "no bias" are ours without.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench import on
from flash_attn import flash_attn_func, fork_info
from timing import Call, measure
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

compiled_flex = torch.compile(flex_attention, dynamic=False)


def gradients(out: torch.Tensor, inputs: list[torch.Tensor], upstream: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(out, inputs, upstream))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write every figure here")
    for name, default in (("batch", 4), ("heads", 16), ("length", 4096), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def main() -> None:
    arguments = options()
    batch, heads, length, dim = arguments.batch, arguments.heads, arguments.length, arguments.head_dim
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    q, k, v = (
        torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.float16, requires_grad=True)
        for _ in range(3)
    )
    by_heads = [t.transpose(1, 2) for t in (q, k, v)]  # what the others take; a view
    upstream = torch.randn_like(q)
    bias = torch.randn(1, heads, length, length, device="cuda", dtype=torch.float16, requires_grad=True)
    hidden = (torch.arange(length, device="cuda") // 512 % 2).bool()[None, None, None]
    mask = hidden.expand(batch, heads, length, length)
    written = mask[:1].contiguous()

    def efficient(own: torch.Tensor | None) -> torch.Tensor:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
            return scaled_dot_product_attention(*by_heads, attn_mask=own).transpose(1, 2)

    def flex(**own: Any) -> torch.Tensor:
        return compiled_flex(*by_heads, **own).transpose(1, 2)

    def add(
        score: torch.Tensor, _b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        return score + bias[0, h, i, j]

    def sees(_b: torch.Tensor, _h: torch.Tensor, _i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return hidden[0, 0, 0, j]

    def record(case: str, calls: dict[str, Call | Callable[[], list[torch.Tensor]]]) -> None:
        works: dict[str, Call] = {}
        for name, told in calls.items():
            call = told if isinstance(told, Call) else Call(told)
            try:
                with call.scope():
                    call.run()
                works[name] = call
            except Exception as e:  # a competitor may not take the case
                print(f"{case}: {name} does not take it: {str(e).splitlines()[0]}")
                rows.append({"case": case, "variant": name, "error": str(e)})
        figures = measure(works)
        base = figures["ours"]["ms"]
        rows.extend(
            {"case": case, "variant": name, **f, "ratio": f["ms"] / base} for name, f in figures.items()
        )
        print(
            case.ljust(28),
            "  ".join(
                f"{n} {f['ms']:.4f} ({f['ms'] / base:.2f}, {f['mb']:.0f} MB)" for n, f in figures.items()
            ),
            flush=True,
        )

    with torch.no_grad():
        plain = lambda: [flash_attn_func(q, k, v)]  # noqa: E731
        biased = Call(lambda: [flash_attn_func(q, k, v, attn_bias=bias)])
        masked = Call(lambda: [flash_attn_func(q, k, v, attn_mask=mask)])
        own = {"ours": biased, "ours on 2048": on(2048, biased), "no bias": plain}
        record(
            "bias (1, H, S, S), forward",
            {**own, "SDPA": lambda: [efficient(bias)], "flex": lambda: [flex(score_mod=add)]},
        )
        blocks = create_block_mask(sees, None, None, length, length, device="cuda")
        own = {"ours": masked, "ours on 2048": on(2048, masked), "no mask": plain}
        record(
            "half of the keys, forward",
            {**own, "SDPA": lambda: [efficient(mask)], "flex": lambda: [flex(block_mask=blocks)]},
        )
        record(
            "the same, each query's own",
            {"ours": Call(lambda: [flash_attn_func(q, k, v, attn_mask=written)]), "no mask": plain},
        )

    inputs = [q, k, v, bias]
    biased = Call(lambda: gradients(flash_attn_func(q, k, v, attn_bias=bias), inputs, upstream))
    own = {
        "ours": biased,
        "ours on 2048": on(2048, biased),
        "no bias": lambda: gradients(flash_attn_func(q, k, v), inputs[:3], upstream),
    }
    others = {
        "SDPA": lambda: gradients(efficient(bias), inputs, upstream),
        "flex": lambda: gradients(flex(score_mod=add), inputs, upstream),
    }
    record("bias, forward and backward", {**own, **others})
    masked = Call(lambda: gradients(flash_attn_func(q, k, v, attn_mask=mask), inputs[:3], upstream))
    record(
        "half of the keys, both",
        {
            "ours": masked,
            "no mask": own["no bias"],
            "SDPA": lambda: gradients(efficient(mask), inputs[:3], upstream),
        },
    )
    if arguments.json:
        facts = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "fork": fork_info(),
            "shape": [batch, heads, length, dim],
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
