"""The training of own_loop.py in several processes, which continues where it was stopped.

torchrun --nproc-per-node 2 examples/own_loop_processes.py FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

from dpgcl_core import make_private, two_view_group_loss

dist.init_process_group("gloo")  # before make_private
torch.manual_seed(0)  # the same data and initial weights in every process
images = torch.rand(2000, 8, 8)
views = torch.stack([images, images + 0.1 * torch.randn_like(images)], dim=1)
loader = DataLoader(TensorDataset(views), batch_size=128)  # 128 records per step of all processes, expected
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def loss(groups: torch.Tensor) -> torch.Tensor:
    embeddings = normalize(model(groups.flatten(0, 2)), dim=-1)
    return two_view_group_loss(embeddings.unflatten(0, groups.shape[:3]), temperature=0.5)


folder = Path(sys.argv[1])
training = make_private(
    model,
    optimizer,
    loader,
    loss=loss,
    group_size=8,
    num_steps=50,
    target_epsilon=8.0,
    mixes_no_records=True,
    folder=folder,  # counts every draw before it is made
    num_restart_steps=10,  # steps that restarts may repeat, charged in advance
)
if (folder / "state.pt").exists():
    training.load_state_dict(torch.load(folder / "state.pt"))
for groups in training:  # this process's share of the groups, which may be empty
    training.step(groups)
    if training.num_steps_taken % 5 == 0 and dist.get_rank() == 0:
        torch.save(training.state_dict(), folder / "state.new")
        (folder / "state.new").replace(folder / "state.pt")
if dist.get_rank() == 0:
    print(training.statement())
dist.barrier()  # no process ends before the first one has printed
dist.destroy_process_group()
