"""The training of own_loop.py in PyTorch Lightning, in one process: `pip install pytorch-lightning`."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

from dpgcl_core import make_private, two_view_group_loss

loader = DataLoader(TensorDataset(torch.rand(2000, 2, 8, 8)), batch_size=128)
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)


def loss(groups: torch.Tensor) -> torch.Tensor:  # of the network alone, not of the LightningModule
    embeddings = normalize(net(groups.flatten(0, 2)), dim=-1)
    return two_view_group_loss(embeddings.unflatten(0, groups.shape[:3]), temperature=0.5)


training = make_private(net, optimizer, loader, loss=loss, group_size=8, num_steps=50, target_epsilon=8.0)


class Contrastive(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # `training.step` makes the passes, and steps the optimizer
        self.net, self.draws = net, iter(training)

    def training_step(self, step: int) -> None:
        training.step(next(self.draws))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer


trainer = pl.Trainer(max_epochs=1, devices=1, logger=False, enable_checkpointing=False)
trainer.fit(Contrastive(), train_dataloaders=range(50))
print(f"ε = {training.epsilon():.2f} at δ = {training.mechanism.target_delta:.2g}")
