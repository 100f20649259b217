"""Write the prompts of all sums of two digits, and texts of such sums that are wrong by up to 4, for the warm-up."""

import json
import random
from pathlib import Path


def main() -> None:
    """Write tokens.txt, warmup.jsonl and prompts.jsonl to the working folder."""
    random.seed(1234)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    near = [max(0, a + b + random.randint(-4, 4)) for _ in range(60) for a, b in pairs]
    texts = [f"{a}+{b}={wrong}" for (a, b), wrong in zip(pairs * 60, near, strict=True)]
    Path("warmup.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prompts = [{"prompt": f"{a}+{b}=", "sum": a + b} for a, b in pairs]
    Path("prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in prompts))


if __name__ == "__main__":
    main()
