"""Every network that a task of this package trains."""

from __future__ import annotations

from typing import TypeAlias

from trainers.models.captioner import Captioner
from trainers.models.classifier import Classifier
from trainers.models.clip.clip_encoder import ImageTextEncoder
from trainers.models.encoder import Encoder
from trainers.models.masked import MaskedAutoEncoder

AnyEncoder: TypeAlias = Encoder | ImageTextEncoder | MaskedAutoEncoder | Captioner | Classifier
