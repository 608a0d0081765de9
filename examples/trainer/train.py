"""Trains a small Llama on a text by Hugging Face's Trainer, on one process or on several.

python train.py --single
torchrun --nproc-per-node 4 train.py --tensor 2

Both print the same losses and gradient norms.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, Trainer, TrainingArguments

TEXT = Path(__file__).resolve().parents[1] / "train_gpt" / "text.txt"
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
GLOBAL_BATCH = 8


class TensorParallelTrainer(Trainer):
    """A Trainer of a model whose layers the ranks of tensor-parallel groups share.

    Trainer and accelerate take all processes for replicas. What they ask of the accelerator is
    given for the replicas that there are: batches, averaged gradients, norms and weights.

    Args:
        args: As of Trainer.
        replicas: The data-parallel ranks.
        kwargs: As of Trainer.
    """

    def __init__(self, *args: Any, replicas: DeviceMesh, **kwargs: Any) -> None:
        self.replicas = replicas
        super().__init__(*args, **kwargs)
        if self.args.save_strategy != "no" and not self.args.save_only_model:
            raise ValueError("one rank would save its own optimizer state: save_only_model=True")
        if self.args.fp16:
            raise ValueError("accelerate's scaler would have ranks skip steps alone: bf16=True")

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator, and has it know the replicas."""
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        accelerator.prepare_model = partial(self.replicate, accelerator.prepare_model)
        accelerator.prepare_data_loader = self.load_alike
        accelerator.clip_grad_norm_ = self.clip
        # Trainer takes it up again after each evaluation.
        accelerator.gather_for_metrics = self.gather_function = self.found

    def replicate(
        self, prepare: Any, model: Any, evaluation_mode: bool = False, **others: Any
    ) -> Any:
        """Mixed precision as accelerate does it, and averages of the replicas' gradients."""
        model = prepare(model, evaluation_mode=True, **others)
        if evaluation_mode or self.replicas.size() == 1:
            return model
        return DistributedDataParallel(model, process_group=self.replicas.get_group())

    def load_alike(self, loader: DataLoader[Any], *_: Any, replicas: int = 1, **__: Any) -> Any:
        """A loader of which all ranks of one tensor-parallel group get the same batches."""
        return prepare_data_loader(
            loader,
            self.args.device,
            num_processes=replicas,
            process_index=self.replicas.get_local_rank() if replicas > 1 else 0,
            put_on_device=True,
            use_seedable_sampler=True,
            data_seed=self.args.data_seed,
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The batches of this rank's replica."""
        whole = self.accelerator.prepare_data_loader
        self.accelerator.prepare_data_loader = partial(whole, replicas=self.replicas.size())
        try:
            return super().get_train_dataloader()
        finally:
            self.accelerator.prepare_data_loader = whole

    def found(self, found: Any, **_: Any) -> Any:
        """What a rank finds in evaluation, where each goes through all that there is."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return found
        return recursively_apply(lambda tensor: tensor[: state.remainder], found)

    def clip(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips by the whole model's norm."""
        from parallel.tensor_parallel import clip_grad_norm_

        self.accelerator.unscale_gradients()
        return clip_grad_norm_(self.model, max_norm, norm_type)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the original's checkpoint; every rank calls it."""
        from parallel.loading import full_state_dict

        self._save(output_dir, state_dict=full_state_dict(self.model))


def main() -> None:
    """Reads the command line, and trains."""
    parser = argparse.ArgumentParser(description="Train a small Llama with Trainer.")
    parser.add_argument("--single", action="store_true", help="the original, in one process")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--steps", type=int, default=20, help="how far to train")
    parser.add_argument("--save", default="trained", help="a folder for the weights")
    options = parser.parse_args()
    torch.manual_seed(0)  # every rank alike: each draws its part of the same weights
    if options.single:
        from transformers import LlamaForCausalLM

        make, replicas = partial(Trainer, LlamaForCausalLM(CONFIG)), 1
    else:
        from parallel import loading, modeling_llama, tensor_parallel

        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        sizes = dist.get_world_size() // options.tensor, options.tensor
        mesh = init_device_mesh(device, sizes, mesh_dim_names=("data", "tensor"))
        tensor_parallel.set_group(mesh["tensor"].get_group())
        model = loading.build(lambda: modeling_llama.LlamaForCausalLM(CONFIG))
        make, replicas = partial(TensorParallelTrainer, model, replicas=mesh["data"]), sizes[0]
    text = torch.tensor(list(TEXT.read_bytes()))
    rows = [{"input_ids": row, "labels": row} for row in text.split(64)[:-1]]
    trainer = make(
        args=TrainingArguments(
            options.save,
            max_steps=options.steps,
            per_device_train_batch_size=GLOBAL_BATCH // replicas,
            learning_rate=3e-3,
            max_grad_norm=1.0,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=max(1, options.steps // 2),
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=rows[16:],
        eval_dataset=rows[:15],
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        for row in trainer.state.log_history:
            for name in ("loss", "eval_loss"):
                if name in row:
                    norm = f"  norm {row['grad_norm']:.4f}" if name == "loss" else ""
                    print(f"step {row['step']:4}  {name} {row[name]:.4f}{norm}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
