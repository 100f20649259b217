"""The other side of `minhash.py`: datatrove's four steps of MinHash de-duplication, with FineWeb's settings and its own tools.

    python benchmarks/datatrove_minhash.py INPUT OUTPUT CORES

INPUT is a folder of JSON lines, one file a task; prints wall and processor seconds, the largest process and what stays.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig


def main(source: Path, output: Path, cores: int) -> None:
    config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8, hash_config=HashConfig(precision=64))
    tasks = len(list(source.iterdir()))
    read = JsonlReader(str(source))

    def run(pipeline: list[object], tasks: int, name: str) -> None:
        # Forked workers are waited for, so that their processor time counts.
        log = str(output / "log" / name)
        LocalPipelineExecutor(pipeline, tasks, cores, logging_dir=log, start_method="fork").run()

    start = time.perf_counter()
    run([read, MinhashDedupSignature(str(output / "signatures"), config)], tasks, "signatures")
    buckets = MinhashDedupBuckets(str(output / "signatures"), str(output / "buckets"), config=config)
    run([buckets], config.num_buckets, "buckets")
    run([MinhashDedupCluster(str(output / "buckets"), str(output / "remove"), config=config)], 1, "cluster")
    dropped = JsonlWriter(str(output / "dropped"), compression=None)
    kept = JsonlWriter(str(output / "kept"), compression=None)
    run([read, MinhashDedupFilter(str(output / "remove"), exclusion_writer=dropped), kept], tasks, "filter")
    wall = time.perf_counter() - start
    own, workers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({
        "wall": wall,
        "cpu": sum(used.ru_utime + used.ru_stime for used in (own, workers)),
        "largest_process_mb": max(own.ru_maxrss, workers.ru_maxrss) / 1e3,
        "kept": sorted(json.loads(line)["id"] for path in (output / "kept").iterdir() for line in path.open()),
    }))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
