"""Errors of the command line, provoked as a stranger would: each names its subject, what was found, and a fix."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_models import save_tiny, variant

from mega_ckpt.families import find_family_by_name
from mega_cli.main import main
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import train_tokenizer

RUN = """
model: {preset: tiny, vocab_size: 300}
data: {train: d/c, seq_length: 32}
batch: {micro: 2, global: 4}
train: {steps: 3}
precision: fp32
"""
LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1\n"
PREPROCESS = "data preprocess -i text.jsonl --tokenizer hf --output out/x"
TRAIN = "train run.yaml --check --set"
GRPO = (
    "train run.yaml --check --set data.train=three.jsonl --set data.kind=prompts --set data.tokenizer=hf"
    " --set objective.kind=grpo --set objective.max_new_tokens=4 --set objective.rewards=rewards.py:score"
    " --set objective.group_size=2 --set"
)
CHAT = "data preprocess --kind conversations --tokenizer hf --output out/r --chat-template t.jinja"
# Words of Python, of its libraries and of mega's code, which a stranger does not know.
PRIVATE = re.compile(
    r"internal error|Traceback|Errno|NoneType|Value error|nput should|valid dictionary|unicode string|\b(None|True|False)\b|object at 0x|PosixPath"
)
# The command; its subject; what was found; the fix.
CASES: list[tuple[str, str, str, str]] = [
    (f"{PREPROCESS} --shard 3/2", "--shard", "3/2", "--shard 1/2"),
    (f"{PREPROCESS} --shard two", "--shard", "two", "--shard 1/8"),
    (f"{PREPROCESS} --workers 0", "--workers", "", "greater than or equal to 1"),
    (f"{PREPROCESS} --workers x", "--workers", "", "must be a whole number"),
    (f"{PREPROCESS} --on-bad-line ignore", "--on-bad-line", "'ignore'", "'skip'"),
    (f"{PREPROCESS} --shards 4", "--shards", "--engine threads", "--shard I/N"),
    (f"{PREPROCESS} --apend-eod", "--apend-eod", "", "--append-eod"),
    (
        "data preprocess -i empty.jsonl --tokenizer hf --output out/x",
        "empty.jsonl",
        "the file is empty",
        "the right file",
    ),
    ("data preprocess -i nokey.jsonl --tokenizer hf --output out/x", "nokey.jsonl:1", "body", "--json-key KEY"),
    ("data preprocess -i nope.jsonl --tokenizer hf --output out/x", "nope.jsonl", "no such file", "check the path"),
    ("data preprocess -i 'no*.txt' --tokenizer hf --output out/x", "no*.txt", "no file matches", "check the folder"),
    ("data preprocess -i folder --tokenizer hf --output out/x", "folder", "no files", "give a folder with files"),
    ("data preprocess -i text.jsonl --tokenizer text.jsonl --output out/x", "text.jsonl", "can read", "give the"),
    ("data train-tokenizer -i text.jsonl --vocab-size 10 --output out/t", "--vocab-size", "found 10", "at least 257"),
    ("data train-tokenizer -i empty.jsonl --vocab-size 300 --output out/t", "tokenizer", "empty", "give other files"),
    ("data clean -i text.jsonl --output out/c", "data clean", "requires rules", "--config clean.yaml"),
    ("data clean -i text.jsonl --output out/c --set length.min_wordz=3", "rules of --set", "min_wordz", "'min_words'"),
    ("data clean -i text.jsonl --output out/c --set length.min_words=a", "rules of --set", "'a'", "a whole number"),
    ("data clean -i text.jsonl --output out/c --config empty.yaml", "empty.yaml", "no content", "KEY: VALUE"),
    ("data show folder", "folder.idx", "is a folder", "mega data preprocess"),
    ("data show d", "d.idx", "is a folder", "d/c"),
    (
        "data preprocess -i table.csv --tokenizer hf --output out/x",
        "table.csv",
        "columns are question, answer",
        "--json-key KEY",
    ),
    (
        "data preprocess -i number.jsonl --tokenizer hf --output out/x",
        "number.jsonl:1",
        "is a number",
        "--json-key KEY",
    ),
    (f"{PREPROCESS} --kind labels", "text.jsonl:1: no 'label'", "the keys are text", "--map label=COLUMN"),
    ("data inspect run.yaml", "run.yaml.idx", "a file of settings", "the prefix of a data set"),
    ("data inspect d/nope", "d/nope.idx", "no such file", "data sets in d: "),
    ("ckpt inspect nope", "nope", "no such folder", "give a folder"),
    ("ckpt diff hf hf", "hf", "not a mega checkpoint", "mega ckpt convert hf OUTPUT --to mega"),
    ("ckpt prune folder out/p", "folder", "manifest.json is missing", "give a folder"),
    ("ckpt convert hf out/p --to peft", "--to peft", "a whole model", "use --to hf"),
    ("ckpt convert hf out/p --to hf --ema", "hf", "no exponential moving average", "leave out --ema"),
    ("ckpt convert hf out/p --to hf --vocab-size 5", "--vocab-size", "found 5", "at least 300"),
    ("ckpt convert hf out/p --to onnx", "--to", "'onnx'", "'hf', 'mega'"),
    ("ckpt average hf --output out/a", "average", "found 1", "give each by its folder"),
    ("ckpt average hf hf --output out/a --weights 1", "--weights", "found 1", "--weights 1,1"),
    ("ckpt average hf hf --output out/a --weights 1,-1", "--weights", "found -1", "leave out"),
    ("ckpt merge-adapter hf nope out/m", "nope", "no such folder", "run with `lora`"),
    ("ckpt upcycle hf out/u --experts 4 --top-k 8", "--top-k", "top_k = 8", "at most the 4 experts"),
    ("train nope.yaml", "nope.yaml", "no such file", ""),
    ("train --config run.yaml", "--config", "No such option", "mega train run.yaml"),
    ("generate hf once", "(once)", "the command takes MODEL", "--prompt TEXT"),
    ("train words.yaml", "words.yaml", "'just text'", "KEY: VALUE"),
    ("train broken.yaml", "broken.yaml", "line 1, column 4: the [ is not closed", "before line 2"),
    (f"{TRAIN} train.steps=many", "train.steps", "'many'", "must be a whole number"),
    (f"{TRAIN} train.steps=1.5", "train.steps", "1.5", "must be a whole number"),
    (f"{TRAIN} optimizer.lr=3e", "optimizer.lr", "'3e'", "must be a number"),
    (f"{TRAIN} deterministic=3", "deterministic", "3", "must be true or false"),
    (f"{TRAIN} log.wandb=3", "log.wandb", "3", "must be a text"),
    (f"{TRAIN} objective=dpo", "objective", "'dpo'", "must be a section"),
    (f"{TRAIN} 'data.train=[]'", "data.train", "[]", "must have at least 1 item"),
    (f"{TRAIN} model.activation=swiglo", "model.activation", "'swiglo'", "did you mean 'swiglu'?"),
    (f"{TRAIN} fp8.recipe=delayed", "fp8.recipe", "'delayed'", "set fp8.recipe=tensorwise"),
    (f"{TRAIN} optimizer", "--set", "'optimizer'", "KEY=VALUE"),
    (f"{TRAIN} train.steps.x=1", "--set", "a value, not a section", ""),
    ("eval hf --data d/c --device tpu", "--device", "'tpu'", "use --device auto"),
    ("generate hf --prompt-file three.jsonl", "three.jsonl", "the value 3", '{"prompt"'),
    ("generate hf --prompt x --top-p 2", "top_p", "2.0", "less than or equal to 1"),
    ("demo --output text.jsonl", "text.jsonl", "it is a file", "a folder is required"),
    (f"{TRAIN} objective.kind=DPO --set objective.beta=0.1", "1 problem", "'DPO'", "set objective.kind=dpo"),
    (f"{TRAIN} objective.kind=orpo --set objective.beta=0.1", "1 problem", "'orpo'", "or remove objective.kind"),
    (
        "train run.yaml --check --set data.kind=pairs --set objective.kind=grpo",
        "1 problem",
        "'grpo'",
        "data.kind=prompts",
    ),
    (f"{TRAIN} parallel.cp=3", "parallel.cp = 3", "found 32", "set parallel.cp=2"),
    (f"{TRAIN} data.train=d/cc", "data.train = 'd/cc'", "no cc.idx", "did you mean d/c?"),
    (f"{PREPROCESS} --max-length 9", "--max-length conflicts", "texts", "leave it out"),
    (
        "data preprocess -i hf --tokenizer hf --output out/x",
        "hf",
        "the folder of a model",
        "give the folder of the texts",
    ),
    ("ckpt reshard hf out/r", "'reshard'", "", "Every layout loads every checkpoint"),
    ("launch run.yaml", "'run.yaml'", "", "slurm, kubernetes"),
    ("run wf.yaml", "stages.b.needs", "'aa'", "did you mean 'a'?"),
    ("sweep run.yaml --random 3", "mega sweep", "requires a setting", "optimizer.lr=1e-4..1e-2:log"),
    (
        "scaling table.csv",
        "table.csv",
        "no column loss, parameters, tokens; its columns are question, answer",
        "are required",
    ),
    (f"{TRAIN} parallel.pp=2 --nproc 3", "parallel", "does not divide 3", "start 2 or 4 ranks"),
    (f"{TRAIN} model.preset=tinny", "model.preset", "'tinny'", "did you mean 'tiny'?"),
    ("trian run.yaml", "trian", "", "'train'"),
    ("data preprocess -i d/c.bin --tokenizer hf --output out/x", "d/c.bin", "has tokens already", "prefix d/c"),
    ("data preprocess -i plain.jsonl --tokenizer hf --output out/x", "plain.jsonl:1", "not JSON", "end in .txt"),
    ("data show text.jsonl", "text.jsonl", "a file of records", "--input text.jsonl"),
    ("data convert-tokenizer hf/tokenizer.json -i text.jsonl --output out/t", "hf/tokenizer.json", "already", "hf"),
    ("eval hf --data d/chats", "d/chats", "found conversations", "set data.valid"),
    ("eval hf --data text.jsonl", "text.jsonl", "a file of records", "then give text"),
    ("ckpt convert d out/g --to hf", "d", "token files (c.idx)", "not a model"),
    (
        "ckpt convert release/mp_rank_00 out/g --to hf",
        "release/mp_rank_00",
        "one rank of a Megatron",
        "parent, release",
    ),
    ("ckpt convert hf out/f --to hf --family gpt2", "gpt2", "not 'rope'", "leave out --family"),
    ("generate hf --prompt x --grammar run.yaml", "run.yaml", "line 8, column 1", "a JSON schema, which"),
    ("embed hf text.jsonl --output v.npy --prompt-name q", "--prompt-name 'q'", "has no prompts", "--prompt TEXT"),
    ("plan run.yaml --machine run.yaml", "run.yaml", "model, data, batch, train", "such as gpu, generation"),
    ("plan hf/model.safetensors", "hf/model.safetensors", "is binary", "its folder"),
    ("train text.jsonl", "text.jsonl", "line 2: a second value", "KEY: VALUE"),
    ("train --from-deepspeed run.yaml", "run.yaml", "a run.yaml of mega already", "mega train run.yaml"),
    ("tune hf chats.jsonl --check", "hf", "no chat template", "data.raw.chat_template=FILE"),
    ("tune hf text.jsonl --check --epochs 0", "epochs", "0", "must be greater than 0"),
    (f"{TRAIN} objective.kind=ppo", "objective.kind", "'ppo'", "set objective.kind=grpo"),
    (f"{TRAIN} data.kind=chat", "data.kind", "'chat'", "set data.kind=conversations"),
    (f"{TRAIN} data.kind=pairs --set objective.kind=simpo", "d/c", "has text", "--kind pairs"),
    (f"{TRAIN} data.kind=fim --set data.tokenizer=hf", "data.fim.tokens", "are missing", "set data.fim.tokens"),
    (f"{TRAIN} tokenizer=hf", "tokenizer", "unknown key", "did you mean data.tokenizer?"),
    (f"{TRAIN} model.preset=null --set model.from=nope", "nope", "no such folder", "give a mega checkpoint"),
    (
        f"{GRPO} objective.rewards=typing_error.py:score",
        "objective.rewards",
        "not valid Python, line 1",
        "correct the file",
    ),
    (f"{GRPO} objective.rewards=rewards.py:exact", "objective.rewards", "no 'exact'", "rewards.py:other"),
    (
        f"{GRPO} objective.rewards=no_package.rewards:exact",
        "objective.rewards",
        "no module no_package.rewards",
        "install the package",
    ),
    (f"{GRPO} objective.group_size=3", "batch.global", "4", "set batch.global=6"),
    ("data show run.yamll", "run.yamll.idx", "no such file", "did you mean the file run.yaml?"),
    ("data inspect d/lfs", "d/lfs.idx", "a Git LFS pointer", "git lfs pull"),
    ("ckpt inspect lfs", "lfs/config.json", "a Git LFS pointer", "git lfs pull"),
    (
        "data preprocess -i text.jsonl --tokenizer lfs --output out/l",
        "lfs/tokenizer.json",
        "a Git LFS pointer",
        "git lfs pull",
    ),
    ("ckpt verify lfs-weights", "lfs-weights/model.safetensors", "a Git LFS pointer", "git lfs pull"),
    (f"{TRAIN} data.train=d/c --set batch.micro 4", "mega train", "run.yaml, 4", "--set KEY=VALUE"),
    (f"{TRAIN} model.preset=null --set model.from=xlnet", "'xlnet'", "not supported", "implementation: transformers"),
    (f"{TRAIN} model.num_heads=3", "model.num_heads", "unknown key", "'num_attention_heads' or"),
    (
        f"{TRAIN} lr_schedule.name=cosine_with_warmup",
        "lr_schedule.name",
        "'cosine_with_warmup'",
        "set lr_schedule.name=cosine",
    ),
    (f"{TRAIN} parallel.tp=2 --nproc 7", "parallel", "does not divide 7", "ranks"),
    ("train tab.yaml", "tab.yaml", "line 2 is indented with a tab", "requires spaces"),
    ("data preprocess -i quote.jsonl --tokenizer hf --output out/x", "quote.jsonl:2", "column 13", "is not closed"),
    ("data preprocess -i open.json --tokenizer hf --output out/x", "open.json:3", "no closing bracket", "is truncated"),
    ("data preprocess -i cut.json --tokenizer hf --output out/x", "cut.json:2", "record 2 is cut off", "is truncated"),
    (
        f"{PREPROCESS} --kind conversations --map text=content",
        "--map text=content",
        "'text' is not a key",
        "--json-key content",
    ),
    ("tune out/none text.jsonl", "MODEL = out/none", "no such folder", "give the path of an existing folder"),
    ("ckpt convert hf out/f --to hf --family qwen", "--family", "'qwen'", "leave out --family"),
    (
        f"{TRAIN} 'extensions=[./noblock.py]'",
        "noblock.py",
        "objectives['mine'] must be a Objective",
        "docs/extensions.md",
    ),
    ("train --from-deepspeed both.json", "both.json", "bf16.enabled and fp16.enabled are both true", "keep one"),
    ("train --from-hf-args bothhf.json", "bothhf.json", "bf16 and fp16 are both set", "keep one"),
    ("compare eval.json eval.json", "eval.json", "a result of mega eval --data", "--tasks NAME --log-samples"),
    ("sweep run.yaml --random 4 optimizer.lr=1e-4-1e-2", "'optimizer.lr=1e-4-1e-2'", "LOW..HIGH", "1e-4..1e-2"),
    ("train --from-megatron-args other.sh", "line 1: train.py", "--num-layers", "--from-hf-args"),
    ("train --from-hf-args hf/config.json", "hf/config.json", "is the config.json of a model", "--set model.from=hf"),
    (f"{TRAIN} recompute=true", "recompute = true", "a section of keys", "one of none, selective, full"),
    (f"{TRAIN} lr_schedule=cosine", "lr_schedule = 'cosine'", "a section of keys", "set lr_schedule.name=cosine"),
    (f"{TRAIN} model.rope=yarn", "model.rope = 'yarn'", "a section of keys", "set model.rope.scaling=yarn"),
    (f"{TRAIN} lora=8", "lora = 8", "a section of keys", "set lora.rank and lora.alpha"),
    (f"{TRAIN} model=tiny", "model = 'tiny'", "a section of keys", "set model.preset=NAME"),
    (f"{TRAIN} model.activation=swish", "'swish'", "must be swiglu", "did you mean 'swiglu'?"),
    (f"{TRAIN} model.mixers.foo.width=3", "model.mixers.foo", "with a mixer 'foo'", "or correct the name"),
    (f"{GRPO} data.raw.chat_template=t.jinja", "= 't.jinja'", "data.kind = prompts", "remove data.raw.chat_template"),
    ("train --from-deepspeed hf", "hf", "is a folder", "ds_config.json"),
    ("train --from-deepspeed hf/config.json", "hf/config.json", "is the config.json of a model", "model.from=hf"),
    ("train --from-deepspeed chats.jsonl", "chats.jsonl", "no setting of such a file, only messages", "ds_config.json"),
    ("train --from-megatron-args run.yaml", "run.yaml", "no training command of Megatron-LM", "pretrain_gpt.py"),
    ("launch kubernetes hf --nodes 1", "hf", "is a folder", "to serve the model in the folder, add --serve"),
    ("launch slurm hf --nodes 1", "hf", "without the runs of a sweep", "give a run.yaml"),
    ("ckpt inspect lfs.gguf", "lfs.gguf", "a Git LFS pointer", "git lfs pull"),
    ("ckpt inspect lfs-torch", "lfs-torch/pytorch_model.bin", "a Git LFS pointer", "git lfs pull"),
    (f"{TRAIN} train.max_steps=5", "train.max_steps", "unknown key", "set train.steps=5 instead"),
    (f"{TRAIN} objective.loss_type=x", "objective.loss_type", "unknown key", "set objective.kind=x instead"),
    (f"{TRAIN} model.num_labels=3", "model.num_labels", "unknown key", "set model.task_head.labels=3 instead"),
    (f"{TRAIN} dpo.beta=0.1", "dpo.beta", "unknown key", "set objective.kind=dpo and objective.beta"),
    (f"{TRAIN} resume_from_checkpoint=true", "resume_from_checkpoint", "unknown key", "the same command resumes"),
    (f"{TRAIN} training.Seq-Len=8", "training.Seq-Len", "unknown key", "set data.seq_length=8 instead"),
    (f"{TRAIN} fp16=true", "fp16 = true", "must be a section", "set precision=fp16"),
    (f"{TRAIN} bf16=false", "bf16", "unknown key", "remove it"),
    ("train hfargs.yaml", "hfargs.yaml", "model_name_or_path", "--from-hf-args FILE"),
    (f"{TRAIN} model.presett=tiny", "model.presett", "unknown key", "did you mean 'preset'?"),
    (f"{TRAIN} precision=fp4", "precision = 'fp4'", "must be", "'bf16'"),
    (f"{TRAIN} optimizer.betas=0.9", "optimizer.betas = 0.9", "must be a list", "set optimizer.betas=[0.9, 0.95]"),
    (f"{TRAIN} 'model.moe={{top_k:4}}'", "unknown key", "", "a space after the colon: top_k: 4"),
    (f"{TRAIN} init_from=d", "init_from = 'd'", "must be a model", "token files (c.idx), not a model"),
    (f"{TRAIN} data.train=nope.jsonl", "data.tokenizer", "nope.jsonl does not exist", "correct the path"),
    ("train hf", "hf", "is a folder", "model.from"),
    ("train run.yaml --resume", "--resume", "", "the same command resumes"),
    ("train run.yaml --lr 3", "--lr", "", "--set KEY=VALUE"),
    ("train run.yaml --learning-rate 3", "--learning-rate", "", "--set optimizer.lr=VALUE instead"),
    ("plan run.yaml --tp 2", "--tp", "--set KEY=VALUE", "did you mean parallel.tp?"),
    ("plan run.yaml --gpus 8", "--gpus", "", "--ranks"),
    ("generate hf --prompt x --do-sample", "--do-sample", "", "--temperature"),
    ("data inspect d/cc", "d/cc.idx", "no such file", "data sets in d: c"),
    ("data preprocess -i text.jsonl --tokenizer gpt2tok --output out/x", "gpt2tok", "merges.txt", "save_pretrained"),
    (f"{CHAT} -i roles.jsonl", "roles.jsonl:1", "the roles are 'user', 'bot'", "give answers the role assistant"),
    (f"{CHAT} -i sharegpt.jsonl", "conversations[1].from", "'bot'", "gpt for the model's answers"),
    (f"{CHAT} -i norole.jsonl", "messages[0] has no 'role'", "its keys are user", '{"role": "user", "content": TEXT}'),
    ("train --from-deepspeed stage.json", "zero_optimization.stage = 5", "is not supported", "0, 1, 2 and 3"),
    ("train --from-hf-args stagehf.json", "deepspeed.zero_optimization.stage = 5", "is not supported", "0, 1, 2 and 3"),
    (
        f"{GRPO} objective.rewards=rewards.py:scre",
        "objective.rewards",
        "no 'scre'",
        "set objective.rewards=rewards.py:score",
    ),
    ("train indent.yaml", "line 3", "a KEY: VALUE inside a value", "indent it like the line above"),
    ("train dedent.yaml", "line 4", "indented differently", "indent all of them alike"),
    ("train colon.yaml", "line 1", "a KEY: VALUE inside a value", "quote the value"),
    (f"{TRAIN} data.train=d/c,d/c", "data.train", "must be a list", "set data.train=[d/c, d/c]"),
    (f"{TRAIN} data.kind=jsonl", "data.kind", "'jsonl'", "set data.kind=text"),
    (
        "eval hf --judge localhost:9 --prompts text.jsonl",
        "--judge localhost:9",
        "http://",
        "--judge http://localhost:9/v1",
    ),
    ("ckpt inspect d", "d: not a mega checkpoint", "manifest.json is missing", "a HuggingFace folder"),
    ("generate hf --prompt x --max_length 3", "--max_length", "", "--max-new-tokens"),
    ("serve hf --tensor-parallel-size 2", "--tensor-parallel-size", "", "--tp"),
    ("launch pbs run.yaml", "'pbs'", "", "slurm, kubernetes"),
    (
        f"{TRAIN} 'extensions=[./broken.py]'",
        "broken.py",
        "SyntaxError: invalid syntax (broken.py, line 1)\n",
        "correct",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model `hf`, a data set `d/c`, a run.yaml, and files that commands cannot use."""
    base = tmp_path_factory.mktemp("messages")
    texts = [f"the end of story {number}" for number in range(40)]
    size = train_tokenizer(texts, 300, base / "hf").vocab_size
    save_tiny(base / "hf", find_family_by_name("llama"), variant("grouped").model_copy(update={"vocab_size": 300}))
    assert size <= 300
    (base / "d").mkdir()
    with IndexedWriter(base / "d" / "c", np.uint16) as writer:
        for _ in range(20):
            writer.add_document(np.arange(50))
    for name in ("c.bin", "c.idx"):
        shutil.copy(base / "d" / name, base / "d" / name.replace("c", "chats", 1))
    with IndexedWriter(base / "d" / "chats.mask", np.uint8) as writer:
        for _ in range(20):
            writer.add_document(np.arange(50) % 2)
    for name in ("folder", "lfs", "xlnet", "gpt2tok"):
        (base / name).mkdir()
    for name in ("lfs-weights", "lfs-torch"):
        shutil.copytree(base / "hf", base / name)
    (base / "release" / "mp_rank_00").mkdir(parents=True)
    (base / "lfs-torch" / "model.safetensors").unlink()
    files = {
        "d/lfs.idx": LFS,
        "d/lfs.bin": LFS,
        "lfs/config.json": LFS,
        "lfs/tokenizer.json": LFS,
        "lfs-weights/model.safetensors": LFS,
        "xlnet/config.json": '{"model_type": "xlnet"}',
        "eval.json": '{"loss": 1.0, "perplexity": 2.7}',
        "other.sh": "python train.py --epochs 3\n",
        "broken.py": "x = 1 +\n",
        "noblock.py": "from mega_trainer.extend import Extension\n"
        "EXTENSION = Extension(name='n', version='1', api=1, objectives={'mine': len})\n",
        "hfargs.yaml": "model_name_or_path: hf\nbf16: true\nmax_steps: 3\n",
        "stage.json": '{"train_batch_size": 8, "zero_optimization": {"stage": 5}}',
        "stagehf.json": '{"per_device_train_batch_size": 1, "deepspeed": {"zero_optimization": {"stage": 5}}}',
        "indent.yaml": "batch:\n  micro: 2\n   global: 4\n",
        "dedent.yaml": "batch:\n   micro: 2\n   global: 4\n  rampup: 3\n",
        "colon.yaml": "output: a: b\n",
        "tab.yaml": "model:\n\tpreset: tiny\n",
        "quote.jsonl": '{"text": "a"}\n{"text": "b}\n',
        "open.json": '[{"text": "a"}, {"text": "b"}',
        "cut.json": '[{"text": "a"}, {"text": "b',
        "both.json": '{"bf16": {"enabled": true}, "fp16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1}',
        "bothhf.json": '{"bf16": true, "fp16": true, "per_device_train_batch_size": 1}',
        "text.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts),
        "nokey.jsonl": '{"body": "abc"}\n',
        "plain.jsonl": "just a text\n",
        "typing_error.py": "def score(prompt\n",
        "rewards.py": "def score(prompt, answer, record): return 1.0\ndef other(prompt, answer, record): return 2.0\n",
        "chats.jsonl": json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n",
        "lfs.gguf": LFS,
        "gpt2tok/vocab.json": "{}",
        "gpt2tok/merges.txt": "",
        "lfs-torch/pytorch_model.bin": LFS,
        "t.jinja": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        "roles.jsonl": json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}),
        "sharegpt.jsonl": json.dumps(
            {"conversations": [{"from": "human", "value": "a"}, {"from": "bot", "value": "b"}]}
        ),
        "norole.jsonl": json.dumps({"messages": [{"user": "a"}, {"role": "assistant", "content": "b"}]}),
        "three.jsonl": '{"prompt": 3}\n',
        "empty.jsonl": "",
        "table.csv": "question,answer\na,b\n",
        "number.jsonl": '{"text": 3}\n',
        "empty.yaml": "",
        "words.yaml": "just text\n",
        "broken.yaml": "a: [1\nb",
        "run.yaml": RUN,
        "wf.yaml": "stages:\n  a: {run: demo, outputs: [a]}\n  b: {run: demo, needs: [aa], outputs: [b]}\n",
    }
    for name, text in files.items():
        (base / name).write_text(text)
    return base


@pytest.mark.parametrize(("command", "subject", "found", "fix"), CASES, ids=[case[0] for case in CASES])
def test_an_error_names_its_subject_what_was_found_and_a_fix(
    command: str,
    subject: str,
    found: str,
    fix: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as end:
        main(shlex.split(command))
    message = capsys.readouterr().err
    assert end.value.code == 2, message
    assert all(text in message for text in (subject, found, fix)), message
    assert not PRIVATE.search(message), message
    assert len(message.splitlines()) <= 24, message
