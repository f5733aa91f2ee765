"""How far the batch moves a model's logits: a prompt alone and among strangers, with the mode off and on.

    python batches.py --json batches.json             # on a GPU
    python batches.py --from batches.json --picture batches.svg

Needs the wheel and transformers; a picture needs matplotlib. The model is a Llama of random weights in
bfloat16, whose attention is Transformers' own "flash_attention_2". Its matrix products take one sequence at a
time, so nothing but attention knows the batch. With the mode off attention is stock's.
"""

import argparse
import json
from pathlib import Path

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def measured(length: int) -> dict:
    import torch
    from flash_attn import deterministic_mode
    from transformers import LlamaConfig, LlamaForCausalLM

    if not torch.cuda.is_available():
        raise SystemExit(
            "batches.py: measuring needs a GPU; --from FILE takes figures that were written before"
        )
    torch.manual_seed(0)
    shape = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        **shape, head_dim=64, num_hidden_layers=4, vocab_size=4096, attn_implementation="flash_attention_2"
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            one = layer.forward
            layer.forward = lambda x, one=one: torch.cat([one(sequence[None]) for sequence in x])
    tokens = torch.randint(4096, (max(BATCHES), length + 1), device="cuda")

    def logits(batch: int) -> torch.Tensor:
        """Of the first prompt's second next token in a batch: prompts are read, then a token of each."""
        read = model(tokens[:batch, :-1], use_cache=True, logits_to_keep=1)
        return model(tokens[:batch, -1:], past_key_values=read.past_key_values).logits[0, -1].float()

    found = {"gpu": torch.cuda.get_device_name(), "length": length, "rows": []}
    for enabled in (False, True):
        with torch.no_grad(), deterministic_mode(enabled):
            alone = logits(1)
            for batch in BATCHES:
                moved = (logits(batch) - alone).abs()
                found["rows"].append(
                    {
                        "mode": "on" if enabled else "off",
                        "batch": batch,
                        "largest": moved.max().item(),
                        "share": (moved > 0).float().mean().item(),
                    }
                )
    return found


def draw(found: dict, path: Path) -> None:
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "batches"  # the same figures give the same file
    axes = (picture := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for mode, label in (("off", "mode off: stock's kernels"), ("on", "mode on")):
        rows = [row for row in found["rows"] if row["mode"] == mode]
        axes.plot([row["batch"] for row in rows], [row["largest"] for row in rows], marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("sequences in the batch")
    axes.set_ylabel("largest change of a logit")
    axes.set_title(f"A prompt of {found['length']} tokens beside strangers, {found['gpu']}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    part = path.with_name(f".{path.name}")
    kind = path.suffix.removeprefix(".") or "svg"
    picture.savefig(part, format=kind, metadata={"Date": None} if kind == "svg" else None)
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--from", dest="given", type=Path, help="figures that were written before")
    parser.add_argument("--picture", type=Path, help="draw them here")
    options = parser.parse_args()
    try:
        found = json.loads(options.given.read_text("utf-8")) if options.given else measured(options.length)
    except (OSError, ValueError) as error:
        parser.error(f"--from {options.given}: {error}")
    for row in found["rows"]:
        print(
            f"mode {row['mode']:3}  batch {row['batch']:2}  largest change {row['largest']:.4f}  "
            f"{100 * row['share']:.1f} % of the logits changed"
        )
    if options.json:
        part = options.json.with_name(f".{options.json.name}")
        part.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        part.replace(options.json)
    if options.picture:
        draw(found, options.picture)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("batches.py: stopped; nothing was written") from None
    except ImportError as error:
        raise SystemExit(f"batches.py: {error}") from None
