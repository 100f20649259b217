"""The training command of a script, however it is launched."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_cli.megatron_args.shell_words import format_unknown_placeholders
from mega_cli.megatron_args.training_command import MegatronTrainingCommand, find_training_command
from mega_common.errors import ConfigError

MODEL = "--num-layers 2 --hidden-size 64"


def arguments(launch: MegatronTrainingCommand) -> str:
    return " ".join(format_unknown_placeholders(word.text) for word in launch.arguments)


LAUNCHERS = {
    "torchrun --nnodes 2 --nproc-per-node=8 pretrain_gpt.py {}": (2, 8),
    "torchrun --nproc_per_node 4 $M/pretrain_gpt.py {} > log 2>&1 &": (1, 4),
    "A=1 B=2 python -u -m torch.distributed.run --nnodes=$N --nproc_per_node=8 pretrain_gpt.py {}": (None, 8),
    "python -m torch.distributed.launch --nproc_per_node 2 pretrain_gpt.py {} 2>&1 | tee -a log": (1, 2),
    "CUDA_VISIBLE_DEVICES=0 nohup numactl -N 0 python pretrain_gpt.py {}": (1, 1),
    "nsys profile -o x torchrun --nproc-per-node 8 pretrain_gpt.py {}": (1, 8),
    "exec accelerate launch --num_machines 2 --num_processes 16 pretrain_gpt.py {}": (1, 1),
    "deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py {}": (2, 8),
    "deepspeed --hostfile=h pretrain_gpt.py {}": (None, None),
    "mpirun --allow-run-as-root -np 16 python pretrain_gpt.py {}": (1, 16),
    "srun -N 4 --ntasks-per-node=8 python pretrain_gpt.py {}": (4, 8),
    "srun -N4 bash -c 'python pretrain_gpt.py {}'": (1, 1),
    'CMD="torchrun --nproc-per-node 8 pretrain_gpt.py {}"; eval $CMD 2>&1 | tee log; exit ${{PIPESTATUS[0]}}': (1, 8),
    'CMD="pretrain_gpt.py {}"; L="torchrun --nnodes 2 --nproc-per-node 8"\nclear; srun bash -c \'$L --node_rank $SLURM_PROCID $CMD\'': (2, 8),
    'CMD="pretrain_gpt.py {}"\nsrun -u bash -c "python -u -m torch.distributed.run --nproc_per_node 4 \\"$X\\" $CMD"': (1, 4),
    "ssh host1 'cd /x && torchrun --nproc-per-node 8 pretrain_gpt.py {}'": (1, 8),
    "pdsh -w h[1-4] \"cd $PWD; torchrun --nproc-per-node 8 pretrain_gpt.py {}\"": (1, 8),
    "docker run --gpus all image bash -lc 'torchrun --nproc-per-node 8 pretrain_gpt.py {}'": (1, 8),
    "docker exec -it c torchrun --nproc-per-node 8 pretrain_gpt.py {}": (1, 8),
    "kubectl exec pod -- bash -c 'torchrun --nproc-per-node 8 pretrain_gpt.py {}'": (1, 8),
    "sbatch -N 2 --wrap='torchrun --nproc-per-node 8 pretrain_gpt.py {}'": (1, 8),
    'sbatch --wrap "torchrun --nproc-per-node 8 pretrain_gpt.py {}"': (1, 8),
    "singularity exec --nv x.sif torchrun --nproc-per-node 8 pretrain_gpt.py {}": (1, 8),
    "sbatch <<EOF\n#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun python pretrain_gpt.py {}\nEOF": (2, 4),
    "cat > job.sh <<'EOF'\ntorchrun --nproc-per-node 8 pretrain_gpt.py {}\nEOF\nsbatch -N 1 job.sh": (1, 8),
    "torchrun --nproc-per-node 8 --no-python $SCRIPT {}": (1, 8),
    "srun -N 4 python -u -m megatron.train {}": (4, 1),
    "torchrun $DIST $SCRIPT {}": (1, 1),
    "python $(dirname $(dirname $0))/pretrain_gpt.py {}": (1, 1),
    "run() {{ torchrun --nproc-per-node $1 \"${{@:2}}\"; }}\nrun 8 pretrain_gpt.py {}": (1, 8),
    "if [ -f /x ]; then torchrun --nproc-per-node 8 pretrain_gpt.py {}; fi": (1, 8),
    "python tools/preprocess_data.py --input x --output y\npython pretrain_gpt.py --help\npython pretrain_gpt.py {}": (1, 1),
    "python tools/convert.py {}\ntorchrun --nproc-per-node 8 pretrain_gpt.py {}": (1, 8),
    "mpirun -np 8 bash entry.sh pretrain_gpt.py \"{}\"": (1, 8),
    "cat <<EOT > ds.json\n{{ \"train_batch_size\": $G, 'x': [1] }}\nEOT\ndeepspeed --num_gpus 8 pretrain_gpt.py {}": (None, 8),
}  # fmt: skip


@pytest.mark.parametrize("script", LAUNCHERS)
def test_launchers(script: str):
    launch = find_training_command(
        script.replace("{{", "\0").replace("{}", MODEL).replace("\0", "{").replace("}}", "}")
    )
    assert arguments(launch) == MODEL
    assert (launch.nodes, launch.per_node) == LAUNCHERS[script]


HELD = {
    f"GPT_ARGS=({MODEL})\nDATA_ARGS=(--data-path x)": f"{MODEL} --data-path x",
    f'A="{MODEL}"\nB="--lr 1"\nALL="$A $B"': f"{MODEL} --lr 1",
    f"D=(--nproc_per_node 8 --nnodes 2)\nM=({MODEL})\nN=4": MODEL,
    f"TP=2\n{MODEL} \\\n--tensor-model-parallel-size ${{TP}} \\\n": f"{MODEL} --tensor-model-parallel-size 2",
    "--lr=1e-3 --swiglu": "--lr=1e-3 --swiglu",
    f"--data-path $DATA {MODEL}": f"--data-path $DATA {MODEL}",
}


@pytest.mark.parametrize("script", HELD)
def test_arguments_without_a_command(script: str):
    launch = find_training_command(script)
    assert (launch.program, arguments(launch)) == ("", HELD[script])


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "python pretrain_gpt.py --lr 1 $MODEL_ARGS",
            r"pretrain_gpt.py requires flags that set a model.*\$MODEL_ARGS",
        ),
        ("source model.sh\ntorchrun pretrain_gpt.py $ARGS", r"requires flags that set a model.*source model.sh"),
        ("source job.sh\nsubmit", r"no training command.*source job.sh"),
        (
            "python pretrain_ict.py --num-layers 2",
            "pretrain_ict.py is not supported: it does not train a decoder, BERT or T5",
        ),
        ("A=1", "no training command"),
        ("", "no training command"),
    ],
)
def test_without_a_model_there_is_nothing_to_translate(script: str, message: str):
    with pytest.raises(ConfigError, match=message):
        find_training_command(script)


def test_the_first_command_with_a_model_is_read_and_the_others_told():
    launch = find_training_command(
        f"python pretrain_gpt.py --lr 1\npython pretrain_ict.py --num-layers 3\npython pretrain_gpt.py {MODEL}\n"
        "torchrun pretrain_gpt.py --num-layers 4"
    )
    assert arguments(launch) == MODEL
    assert [line for line, text in launch.remarks if "was not read" in text] == [1, 2, 4]


def test_an_evaluation_is_read_with_a_remark():
    launch = find_training_command(f"python tasks/main.py --task LAMBADA {MODEL}")
    assert "main.py may not be a training program" in launch.remarks[0][1]


def test_an_open_value_before_the_model_is_no_program():
    launch = find_training_command(f"python -m megatron.train --lr $LR --seed 1 $MORE {MODEL}")
    assert (launch.program, arguments(launch)) == ("megatron.train", f"--lr $LR --seed 1 $MORE {MODEL}")


def test_an_open_value_moves_no_other():
    launch = find_training_command(f"python pretrain_gpt.py {MODEL} --lr $LR --seed ${{SEED}} $MORE --bf16")
    assert arguments(launch) == f"{MODEL} --lr $LR --seed $SEED $MORE --bf16"


def test_definitions_and_arguments_of_the_script():
    script = f"LAYERS=$1; GPUS=4; LR=${{2:-1e-3}}\ntorchrun --nproc-per-node $GPUS pretrain_gpt.py {MODEL} --lr $LR -x $LAYERS $3 $#"
    assert arguments(find_training_command(script)) == f"{MODEL} --lr 1e-3 -x $LAYERS $3 0"
    given = find_training_command(script, define={"GPUS": "8", "LAYERS": "7"}, arguments=["5", "2e-3"])
    assert arguments(given) == f"{MODEL} --lr 2e-3 -x 7 2"
    assert given.per_node == 8


def test_files_beside_the_script_are_read(tmp_path: Path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "model.sh").write_text(f"MODEL_ARGS=({MODEL})\nA=$1")
    (tmp_path / "train.sh").write_text('torchrun --nproc-per-node 8 pretrain_gpt.py "$@" --lr $LR')
    script = tmp_path / "run.sh"
    script.write_text(
        'source $(dirname "$0")/conf/model.sh x\nexport LR=1\nbash ./train.sh ${MODEL_ARGS[@]} --a $A\nsource run.sh\n'
    )
    launch = find_training_command(script.read_text(), path=script)
    assert arguments(launch) == f"{MODEL} --a x --lr 1"
    assert launch.per_node == 8
