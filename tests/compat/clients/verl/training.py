"""Two training steps of the seedling with a verl trainer that samples from a server.

python -m tests.compat.clients.verl.training NAME URL FOLDER    prints the log

NAME is sync, legacy, apart, replayed, distilled or example.

`sync` is verl's default trainer, `legacy` the one before it: every rank has the rollout adapter,
which sends the weights. `apart` is one step off policy, with separate rollout workers: the
checkpoint engine sends the weights. `replayed` is `sync` with truncated samples and their supports.
`distilled` is `sync` with the server as its teacher, too.
`example` is examples/verl, its configuration and reward.
"""

import importlib
import json
import os
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer

from examples.verl import sums
from tests.compat.clients.verl import reward

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "examples" / "seedling" / "model"
HERE = "tests.compat.clients.verl"
STEPS = 2
SUMS = [(12, 34), (5, 6), (7, 8), (90, 1)]
COPPICE = "actor_rollout_ref.rollout"
TEACHER = "distillation.teacher_models.teacher_model"
SYNC = "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"
REPLAYED = [
    f"{COPPICE}.top_p=0.8",
    f"{COPPICE}.temperature=1.5",
    f"+{COPPICE}.engine_kwargs.coppice.return_support=True",
]
TRAINERS = {
    "sync": ("verl.trainer.main_ppo", [SYNC]),
    "replayed": ("verl.trainer.main_ppo", [SYNC, *REPLAYED]),
    "distilled": (
        "verl.trainer.main_ppo",
        [
            SYNC,
            "distillation.enabled=True",
            "distillation.n_gpus_per_node=1",
            "distillation.nnodes=1",
            "distillation.distillation_loss.loss_mode=forward_kl_topk",
            "distillation.distillation_loss.topk=8",
            "distillation.distillation_loss.use_policy_gradient=False",
            "distillation.distillation_loss.use_task_rewards=False",
            f"{TEACHER}.model_path={MODEL}",
            f"{TEACHER}.inference.name=coppice",
            f"{TEACHER}.inference.tensor_model_parallel_size=1",
            f"+{TEACHER}.inference.engine_kwargs.coppice=${{{COPPICE}.engine_kwargs.coppice}}",
        ],
    ),
    "legacy": ("verl.trainer.main_ppo", ["trainer.use_v1=False"]),
    "apart": (
        "verl.experimental.one_step_off_policy.main_ppo",
        [
            "hydra.searchpath=[pkg://verl.trainer.config]",
            "actor_rollout_ref.hybrid_engine=False",
            f"{COPPICE}.checkpoint_engine.backend=coppice",
            "rollout.nnodes=1",
            "rollout.n_gpus_per_node=1",
        ],
    ),
    "example": ("verl.trainer.main_ppo", [SYNC]),
}


def written(folder: Path) -> Path:
    """A data set in verl's format."""
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"Compute {a}+{b}."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index},
        }
        for index, (a, b) in enumerate(SUMS * STEPS * 2)
    ]
    path = folder / "sums.parquet"
    Dataset.from_list(rows).to_parquet(path)
    return path


def tokenizer(folder: Path) -> Path:
    """A tokenizer with the token that verl assumes every Qwen model ends its turns with."""
    words = AutoTokenizer.from_pretrained(MODEL)
    words.add_tokens(["<|im_end|>"], special_tokens=True)
    words.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def overrides(url: str, folder: Path) -> list[str]:
    data = written(folder)
    actor = "actor_rollout_ref.actor"
    return [
        *on_cpu(folder),
        "algorithm.adv_estimator=grpo",
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=32",
        f"actor_rollout_ref.model.path={MODEL}",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=4",
        f"{actor}.optim.lr=1e-3",
        f"{COPPICE}.name=coppice",
        f"+{COPPICE}.engine_kwargs.coppice.urls=[{url}]",
        f"+{COPPICE}.checkpoint_engine.engine_kwargs.coppice=${{{COPPICE}.engine_kwargs.coppice}}",
        f"{COPPICE}.tensor_model_parallel_size=1",
        f"{COPPICE}.n=4",
        f"{COPPICE}.calculate_log_probs=True",
        f"{COPPICE}.log_prob_micro_batch_size_per_gpu=4",
        f"reward.custom_reward_function.path={reward.__file__}",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={STEPS}",
    ]


def on_cpu(folder: Path) -> list[str]:
    """Overrides for one machine without a GPU, which any configuration of verl needs."""
    actor = "actor_rollout_ref.actor"
    return [
        f"hydra.run.dir={folder}/hydra",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.tokenizer_path={tokenizer(folder)}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.model_dtype=fp32",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.use_torch_compile=False",
        f"{COPPICE}.agent.num_workers=1",
        "reward.num_workers=1",
        "trainer.device=cpu",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.val_before_train=False",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={folder}/checkpoints",
        "+ray_kwargs.ray_init.num_gpus=2",
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]


def of_example(url: str, folder: Path) -> list[str]:
    data = folder / "sums.parquet"
    Dataset.from_list(sums.rows(64)).to_parquet(data)
    return [
        "--config-name=grpo",
        *on_cpu(folder),
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"{COPPICE}.engine_kwargs.coppice.urls=[{url}]",
    ]


def main() -> None:
    name, url, place = sys.argv[1:]
    folder = Path(place)
    log = folder / "log.jsonl"
    # Before verl is imported. Ray's own processes inherit them.
    os.environ.update(
        VERL_PLATFORM="cpu",
        VERL_ENGINE_DEVICE="cuda",  # the name under which its FSDP engine is registered
        VERL_USE_EXTERNAL_MODULES=f"{HERE}.cpu,coppice.integrations.verl.plugin",
        VERL_FILE_LOGGER_PATH=str(log),
    )
    module, more = TRAINERS[name]
    trainer = importlib.import_module(module)
    # Hydra looks for it in an imported package, and verl's folder is not always one.
    config = Path(str(trainer.__file__)).parent / "config"
    arguments = overrides(url, folder)
    if name == "example":
        config, arguments = ROOT / "examples" / "verl", of_example(url, folder)
    sys.argv = [module, f"--config-path={config}", *arguments, *more]
    trainer.main()
    print(json.dumps([json.loads(line)["data"] for line in log.read_text().splitlines()]))


if __name__ == "__main__":
    main()
