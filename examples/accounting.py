# %% [markdown]
# # What does a training cost, and what does choosing its settings cost?
#
# Runs as a script, or cell by cell in an editor that knows `# %%`. Nothing is trained: ε follows from public
# numbers alone. All of it is for adding or removing one record of a data set of at most N records.

# %%
from dataclasses import replace

from dpgcl_core import (
    Mechanism,
    TrialClass,
    TruncatedNegativeBinomial,
    default_delta,
    epsilon_pld,
    epsilon_rdp,
    open_cost,
    sealed_cost,
)

# %% [markdown]
# ## One training
#
# N = 60,000 slots for records, cut into groups of 16; each group joins a step with probability
# q = 2048/60,000, for 1,200 steps. Its gradient is clipped to norm C, and one record moves the sum by at most
# C: it completes its own group, or leaves it with an empty slot, and then the group contributes nothing. The
# noise multiplier σ is the noise's standard deviation over that sensitivity.

# %%
n = 60_000
mechanism = Mechanism(
    num_records_public=n,
    sampling_prob=2048 / n,
    group_size=16,
    l2_clip_norm=1.0,
    noise_multiplier=1.94,
    num_steps=1200,
    target_delta=default_delta(n),  # 1/(n ln n)
)
print(f"one training: ε = {mechanism.epsilon():.3f} at δ = {mechanism.target_delta:.2g}")
print(f"noise on the sum: {mechanism.noise().std:.2f}, sensitivity: {mechanism.sensitivity:g}")

# %% [markdown]
# The published scheme samples records and then cuts them into groups: one record more takes another one's
# place, and the sum moves by up to 2C. The same noise is then half as many σ.

# %%
published = replace(mechanism, sampling="records", noise_multiplier=0.97)
print(f"the same noise, records sampled: ε = {published.epsilon():.3f}")
print(f"noise on the sum: {published.noise().std:.2f}, sensitivity: {published.sensitivity:g}")

# %% [markdown]
# The same event by two accountants. Privacy loss distributions (PLD) are the tighter one, and what is stated;
# Rényi differential privacy (RDP) is a cross-check from above.

# %%
event = mechanism.dp_event()
print(f"PLD: {epsilon_pld(event, mechanism.target_delta):.2f}")
print(f"RDP: {epsilon_rdp(event, mechanism.target_delta):.2f}")

# %% [markdown]
# ## Noise for a target
#
# Usually ε is given, and σ follows. It is calibrated, never copied from a paper: another n, q, T or
# sensitivity needs another σ.

# %%
for target in (1.0, 4.0, 8.0):
    calibrated = mechanism.calibrated(target)
    print(f"ε = {target:g} needs σ = {calibrated.noise_multiplier:.3f} (met: {calibrated.epsilon():.3f})")

# %% [markdown]
# ## What tuning costs
#
# *Open*: ten trainings are released, and everyone sees them all. Their costs compose, and that covers any
# search among them.

# %%
trial = TrialClass(sampling_prob=mechanism.sampling_prob, noise_multiplier=1.5, num_steps=1200)
ten = TrialClass(sampling_prob=mechanism.sampling_prob, noise_multiplier=1.5, num_steps=1200, count=10)
cost_when_open = open_cost([ten], delta=mechanism.target_delta)
print(f"one training: ε = {cost_when_open.training_epsilon:.2f}")
print(f"ten, open: ε = {cost_when_open.tuned_epsilon:.2f}")

# %% [markdown]
# *Sealed*: the number of trainings is drawn in secret, ten on average, and only the best one is released.
# That costs less, and nobody may ever learn how many there were.

# %%
law = TruncatedNegativeBinomial.from_mean(10, eta=1)
cost_when_sealed = sealed_cost([trial], law=law, delta=mechanism.target_delta)
print(f"ten on average, sealed: ε = {cost_when_sealed.tuned_epsilon:.2f}")
print(f"by: {cost_when_sealed.theorem}")
