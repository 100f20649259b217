"""The tokenizer library's own loop, for `preprocess.py` to be judged against: it imports nothing of mega.

    python benchmarks/bare_encode.py TOKENIZER.json CORPUS.jsonl

Prints the wall and processor seconds (user and system) of `encode_batch_fast` over the documents in memory, a megabyte a
batch, results thrown away, with every setting of the library as it comes; loading is not counted.
"""

import json
import resource
import sys
import time

from tokenizers import Tokenizer

BATCH = 1 << 20


def main(tokenizer_file: str, corpus: str) -> None:
    tokenizer = Tokenizer.from_file(tokenizer_file)
    groups: list[list[str]] = [[]]
    size = 0
    with open(corpus, encoding="utf-8") as lines:
        for line in lines:
            groups[-1].append(json.loads(line)["text"])
            size += len(groups[-1][-1])
            if size > BATCH:
                groups.append([])
                size = 0
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for group in groups:
        tokenizer.encode_batch_fast(group, add_special_tokens=False)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    print(json.dumps({"wall": time.perf_counter() - start, "cpu": cpu}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
