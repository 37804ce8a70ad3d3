"""The training of own_loop.py in PyTorch Lightning: `pip install pytorch-lightning`, one process."""

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

from dpgcl_core import make_private, two_view_group_loss

NUM_STEPS = 50


class Contrastive(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # `training.step` makes the passes, and steps the optimizer
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        views = torch.rand(2000, 1, 8, 8) + 0.1 * torch.randn(2000, 2, 8, 8)
        options = {"group_size": 8, "num_steps": NUM_STEPS, "target_epsilon": 8.0, "mixes_no_records": True}
        loader = DataLoader(TensorDataset(views), batch_size=128)
        self.training_private = make_private(self.net, self.optimizer, loader, loss=self.loss, **options)
        self.draws = iter(self.training_private)

    def loss(self, groups: torch.Tensor) -> torch.Tensor:
        embeddings = normalize(self.net(groups.flatten(0, 2)), dim=-1)
        return two_view_group_loss(embeddings.unflatten(0, groups.shape[:3]), temperature=0.5)

    def training_step(self, step: int) -> None:
        self.training_private.step(next(self.draws))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


module = Contrastive()
pl.Trainer(max_epochs=1, devices=1, logger=False).fit(module, train_dataloaders=range(NUM_STEPS))
print(f"ε = {module.training_private.epsilon():.2f}")
