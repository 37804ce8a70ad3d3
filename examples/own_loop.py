"""A private contrastive training in a loop of your own: your model, data loader and optimizer."""

import torch
from torch import nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset

from dpgcl_core import make_private, two_view_group_loss

images = torch.rand(2000, 8, 8)  # the records; a data set yields each one's views, [views, ...]
views = torch.stack([images, images + 0.1 * torch.randn_like(images)], dim=1)
loader = DataLoader(TensorDataset(views), batch_size=128)  # 128 records per step, expected
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))  # no BatchNorm
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def loss(groups: torch.Tensor) -> torch.Tensor:  # [groups, S, views, ...] -> [groups], each from its own
    embeddings = normalize(model(groups.flatten(0, 2)), dim=-1)
    return two_view_group_loss(embeddings.unflatten(0, groups.shape[:3]), temperature=0.5)


training = make_private(
    model, optimizer, loader, loss=loss, group_size=8, num_steps=50, target_epsilon=8.0, mixes_no_records=True
)
for groups in training:  # drawn in secret, afresh for every step
    training.step(groups)  # clipped by group, summed, noised, averaged; then optimizer.step()
print(f"ε = {training.epsilon():.2f} at δ = {training.mechanism.target_delta:.2g}")
