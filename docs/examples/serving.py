"""Serve a model with vLLM on flash_attn's kernels, and see that an answer does not depend on the batch.

    pip install vllm==0.26.0 dist/flash_attn-….whl
    VLLM_BATCH_INVARIANT=1 python serving.py --model Qwen/Qwen3-0.6B

Each prompt is answered alone, then all of them at once. VLLM_BATCH_INVARIANT makes vLLM's matrix products and
norms independent of the batch as well; without it log-probabilities differ for other reasons than attention.
"""

import argparse
import sys

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "A list of the first ten prime numbers:",
    "To sort a list in Python without changing it,",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a name at Hugging Face, or a folder")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    options = parser.parse_args()
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        parser.error(f"{error} (pip install vllm==0.26.0)")

    llm = LLM(options.model, attention_backend="CUSTOM")
    how = SamplingParams(temperature=0.0, max_tokens=options.tokens, logprobs=1)

    def answers(prompts: list) -> list:
        """The text of each, and each token with its log-probability."""
        found = []
        for request in llm.generate(prompts, how):
            answer = request.outputs[0]
            steps = zip(answer.token_ids, answer.logprobs, strict=True)
            found.append((answer.text, [(token, step[token].logprob) for token, step in steps]))
        return found

    alone = [answers([prompt])[0] for prompt in PROMPTS]
    together = answers(list(PROMPTS))
    for prompt, one, other in zip(PROMPTS, alone, together, strict=True):
        print(f"{'the same bits' if one == other else 'OTHER BITS'}: {prompt}{one[0]}")
    return 0 if alone == together else 1


if __name__ == "__main__":
    sys.exit(main())
