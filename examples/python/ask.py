"""A model asked from Python: answers scored, texts continued, a chat.

python ask.py MODEL      a mega checkpoint, a run folder, a HuggingFace folder or a GGUF file
"""

from __future__ import annotations

import sys

from mega_common.errors import DataError
from mega_eval.language_model import LanguageModel

QUESTION = "The capital of France is"
ANSWERS = [" Paris", " Rome", " a fish"]


def rank(model: LanguageModel) -> list[tuple[float, str]]:
    """The answers, the likeliest a token first: a multiple-choice question."""
    scores = model.score(ANSWERS, contexts=[QUESTION] * len(ANSWERS))
    found = [(one.logprob / len(one.logprobs), answer) for one, answer in zip(scores, ANSWERS, strict=True)]
    return sorted(found, reverse=True)


def alternatives(model: LanguageModel) -> list[list[tuple[str, float]]]:
    """What the model would have said as well, for each of the tokens that it says."""
    (one,) = model.generate([QUESTION], max_new_tokens=5, logprobs=3)
    return [[(model.tokenizer.decode([token]), logprob) for token, logprob in scored.top] for scored in one.scored]


def main(path: str) -> None:
    """Ask the model in every way."""
    model = LanguageModel.load(path)
    for logprob, answer in rank(model):
        print(f"{logprob:8.3f}  {QUESTION}{answer}")
    for told in alternatives(model):
        print("  ".join(f"{text!r} {logprob:.2f}" for text, logprob in told))
    for text in model.stream(QUESTION, max_new_tokens=20, temperature=0.8, top_p=0.95, seed=1):
        print(text, end="", flush=True)
    print()
    batch = model.generate([QUESTION, "Once upon a time"], max_new_tokens=20, stop=["\n"], batch_size=2)
    for one in batch:
        print(f"{one.finish}: {one.text!r}")
    try:
        print(model.chat([{"role": "user", "content": "What is the capital of France?"}], max_new_tokens=20).text)
    except DataError as error:  # a base model has no chat template
        print(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
