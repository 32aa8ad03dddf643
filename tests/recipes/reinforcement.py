"""Reinforcement learning: what is learnt from a batch of experience."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal

from recipes.recipe import Training, recipe


def experience(steps=4, rows=8, actions=3):
    """States, actions, rewards, the next states, ends."""
    g = torch.Generator().manual_seed(9)
    return [
        (
            torch.randn(rows, 4, generator=g), torch.randint(actions, (rows,), generator=g),
            torch.randn(rows, generator=g), torch.randn(rows, 4, generator=g),
            (torch.rand(rows, generator=g) < 0.3).to(torch.get_default_dtype()),
        )
        for _ in range(steps)
    ]  # fmt: skip


def mlp(inside, out):
    return nn.Sequential(nn.Linear(inside, 8), nn.Tanh(), nn.Linear(8, out))


@recipe("reinforcement learning", "REINFORCE with a baseline")
def reinforce(job):
    """Log probabilities of a distribution, returns that are normalised over the batch, an entropy bonus."""
    policy, value = mlp(4, 3), mlp(4, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], 1e-2, eps=1e-5)

    @job
    def learn(states, actions, rewards, *_):
        returns = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        chosen = Categorical(logits=policy(states), validate_args=False)
        baseline = value(states).squeeze(-1)
        advantage = returns - baseline.detach()
        loss = -(chosen.log_prob(actions) * advantage).mean() - 0.01 * chosen.entropy().mean()
        loss = loss + F.mse_loss(baseline, returns)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training({"policy": policy, "value": value}, optimizer, learn, experience())


@recipe("reinforcement learning", "PPO with several epochs in a step")
def ppo(job):
    """The old policy's probabilities under no_grad, clipped ratios, three updates in one call, clipped gradients."""

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.actor, self.critic = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

        def forward(self, x):
            h = torch.tanh(self.body(x))
            return self.actor(h).log_softmax(-1), self.critic(h).squeeze(-1)

    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-5)

    @job
    def learn(states, actions, rewards, following, ends):
        with torch.no_grad():
            before, values = model(states)
            target = rewards + 0.9 * (1 - ends) * model(following)[1]
            advantage = target - values
            before = before.gather(1, actions[:, None])
        losses = []
        for _ in range(3):
            now, values = model(states)
            ratio = (now.gather(1, actions[:, None]) - before).exp().squeeze(1)
            clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = -clipped.mean() + F.mse_loss(values, target) + 0.01 * (now.exp() * now).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.detach())
        return losses

    return Training(model, optimizer, learn, experience())


@recipe("reinforcement learning", "generalised advantages by a backward loop")
def gae(job):
    """A Python loop from the last time to the first over slices, stacked the other way round."""
    model = nn.GRU(4, 6, batch_first=True)
    head = nn.Linear(6, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.05)

    @job
    def learn(states, rewards):
        values = head(model(states)[0]).squeeze(-1)
        advantages, last = [], torch.zeros_like(rewards[:, 0])
        for t in reversed(range(rewards.shape[1] - 1)):
            delta = rewards[:, t] + 0.9 * values[:, t + 1].detach() - values[:, t].detach()
            last = delta + 0.8 * last
            advantages.append(last)
        target = torch.stack(advantages[::-1], 1) + values[:, :-1].detach()
        loss = F.mse_loss(values[:, :-1], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    g = torch.Generator().manual_seed(4)
    batches = [(torch.randn(8, 5, 4, generator=g), torch.randn(8, 5, generator=g)) for _ in range(3)]
    return Training({"model": model, "head": head}, optimizer, learn, batches)


@recipe("reinforcement learning", "double DQN with a target network that is copied")
def dqn(job):
    """A deep copy that load_state_dict refreshes between calls, argmax actions, Huber loss."""
    online = mlp(4, 3)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), 1e-2, eps=1e-5)
    calls = []

    @job
    def learn(states, actions, rewards, following, ends):
        q = online(states).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            best = online(following).argmax(1, keepdim=True)
            wanted = rewards + 0.9 * (1 - ends) * target(following).gather(1, best).squeeze(1)
        loss = F.smooth_l1_loss(q, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(online.parameters(), 0.1)
        optimizer.step()
        return loss

    def run(*batch):
        calls.append(learn(*batch))
        if len(calls) % 2 == 0:
            target.load_state_dict(online.state_dict())
        return calls[-1]

    return Training({"online": online, "target": target}, optimizer, run, experience())


@recipe("reinforcement learning", "soft actor-critic with three optimizers")
def sac(job):
    """Two critics, a squashed Gaussian policy on given noise, a learnt temperature, targets by Polyak averaging."""
    actor, critics = mlp(4, 4), nn.ModuleList([mlp(6, 1), mlp(6, 1)])
    targets = copy.deepcopy(critics).requires_grad_(False)
    log_alpha = nn.Parameter(torch.zeros(()))
    of_actor = torch.optim.Adam(actor.parameters(), 1e-2, eps=1e-5)
    of_critics = torch.optim.Adam(critics.parameters(), 1e-2, eps=1e-5)
    of_alpha = torch.optim.SGD([log_alpha], 0.01)

    def act(states, noise):
        mean, log_std = actor(states).chunk(2, -1)
        normal = Normal(mean, log_std.clamp(-3, 1).exp(), validate_args=False)
        raw = mean + normal.stddev * noise
        action = torch.tanh(raw)
        return action, (normal.log_prob(raw) - torch.log(1 - action**2 + 1e-6)).sum(-1)

    def value(of, states, actions):
        pair = torch.cat([states, actions], -1)
        return [c(pair).squeeze(-1) for c in of]

    @job
    def learn(states, actions, rewards, following, ends, noise, more):
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            then, log_p = act(following, noise)
            wanted = rewards + 0.9 * (1 - ends) * (torch.min(*value(targets, following, then)) - alpha * log_p)
        critic_loss = sum(F.mse_loss(q, wanted) for q in value(critics, states, actions))
        of_critics.zero_grad()
        critic_loss.backward()
        of_critics.step()

        now, log_p = act(states, more)
        actor_loss = (alpha * log_p - torch.min(*value(critics, states, now))).mean()
        of_actor.zero_grad()
        actor_loss.backward()
        of_actor.step()

        alpha_loss = -(log_alpha * (log_p.detach() - 2)).mean()
        of_alpha.zero_grad()
        alpha_loss.backward()
        of_alpha.step()

        with torch.no_grad():
            for slow, fast in zip(targets.parameters(), critics.parameters(), strict=True):
                slow.mul_(0.95).add_(fast, alpha=0.05)
        return critic_loss, actor_loss, alpha_loss

    g = torch.Generator().manual_seed(5)
    batches = [
        (s, torch.randn(8, 2, generator=g), r, n, e, torch.randn(8, 2, generator=g), torch.randn(8, 2, generator=g))
        for s, _, r, n, e in experience()
    ]
    models = {"actor": actor, "critics": critics, "targets": targets}
    return Training(models, [of_actor, of_critics, of_alpha], learn, batches, lambda: log_alpha.detach())


@recipe("reinforcement learning", "TD3 with delayed policy updates")
def td3(job):
    """Two jobs over the same models, the second one in every other call; DDPG's gradient through the critic."""
    actor, critic = mlp(4, 1), mlp(5, 1)
    slow = copy.deepcopy(nn.ModuleList([actor, critic])).requires_grad_(False)
    of_actor, of_critic = torch.optim.SGD(actor.parameters(), 0.05), torch.optim.SGD(critic.parameters(), 0.05)
    calls = []

    @job
    def learn(states, _, rewards, following, ends):
        with torch.no_grad():
            then = torch.tanh(slow[0](following))
            wanted = rewards + 0.9 * (1 - ends) * slow[1](torch.cat([following, then], -1)).squeeze(-1)
        actions = rewards[:, None].tanh()
        loss = F.mse_loss(critic(torch.cat([states, actions], -1)).squeeze(-1), wanted)
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        return loss

    @job
    def improve(states):
        loss = -critic(torch.cat([states, torch.tanh(actor(states))], -1)).mean()
        of_actor.zero_grad()
        loss.backward()
        of_actor.step()
        with torch.no_grad():
            for s, f in zip(slow.parameters(), [*actor.parameters(), *critic.parameters()], strict=True):
                s.lerp_(f, 0.1)
        return loss

    def run(*batch):
        calls.append(learn(*batch))
        return calls[-1], improve(batch[0]) if len(calls) % 2 == 0 else 0

    models = {"actor": actor, "critic": critic, "slow": slow}
    return Training(models, [of_actor, of_critic], run, experience(), uncalled=("slow", "actor"))


@recipe(
    "reinforcement learning",
    "distributional Q learning",
)
def categorical(job):
    """C51: probabilities projected onto a support by index_add over a flattened batch."""
    model, support = mlp(4, 3 * 5), torch.linspace(-1, 1, 5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-5)

    @job
    def learn(states, actions, rewards, following, ends):
        rows = torch.arange(len(states))
        with torch.no_grad():
            then = model(following).view(-1, 3, 5).softmax(-1)
            best = (then * support).sum(-1).argmax(-1)
            p = then[rows, best]
            at = ((rewards[:, None] + 0.9 * (1 - ends[:, None]) * support).clamp(-1, 1) + 1) / 0.5
            low, high = at.floor().long(), at.ceil().long()
            offset = rows[:, None] * 5
            wanted = torch.zeros_like(p).flatten()
            wanted.index_add_(0, (low + offset).flatten(), (p * (high - at + (low == high))).flatten())
            wanted.index_add_(0, (high + offset).flatten(), (p * (at - low)).flatten())
        found = model(states).view(-1, 3, 5)[rows, actions].log_softmax(-1)
        loss = -(wanted.view_as(p) * found).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, learn, experience())


@recipe("reinforcement learning", "advantage actor-critic with episodes that end")
def a2c(job):
    """Returns by a loop from the last step to the first, dones, a Categorical, a dictionary of logged values."""

    class AC(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
            self.pi, self.v = nn.Linear(16, 3), nn.Linear(16, 1)

        def forward(self, s):
            h = self.body(s)
            return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)

    model = AC()
    opt = torch.optim.RMSprop(model.parameters(), lr=7e-3, eps=1e-5)
    gamma = 0.99
    g = torch.Generator().manual_seed(3)
    batches = [
        (
            torch.randn(8, 5, 4, generator=g),
            torch.randint(3, (8, 5), generator=g),
            torch.randn(8, 5, generator=g),
            (torch.rand(8, 5, generator=g) < 0.2),
        )
        for _ in range(5)
    ]

    @job
    def update(states, actions, rewards, dones):
        dist, values = model(states)
        with torch.no_grad():
            R = values[:, -1]
            returns = []
            for t in reversed(range(rewards.size(1))):
                R = rewards[:, t] + gamma * R * (~dones[:, t])
                returns.insert(0, R)
            returns = torch.stack(returns, dim=1)
        adv = returns - values
        pl = -(dist.log_prob(actions) * adv.detach()).mean()
        vl = adv.pow(2).mean()
        ent = dist.entropy().mean()
        loss = pl + 0.5 * vl - 0.01 * ent
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        return {"pl": pl.detach(), "vl": vl.detach(), "ent": ent.detach(), "norm": norm}

    return Training(model, opt, update, batches)


@recipe("reinforcement learning", "DQN as in PyTorch's tutorial")
def tutorial(job):
    """next_values[mask] = target(next[mask]).max(1), clip_grad_value_, a target that load_state_dict moves."""
    P, T = mlp(4, 2), mlp(4, 2)
    T.load_state_dict(P.state_dict())
    opt = torch.optim.AdamW(P.parameters(), 1e-2, amsgrad=True)

    @job
    def optimize(s, a, r_, ns, mask):
        q = P(s).gather(1, a)
        nv = torch.zeros(s.size(0))
        with torch.no_grad():
            nv[mask] = T(ns[mask]).max(1).values
        y = nv * 0.99 + r_
        loss = nn.SmoothL1Loss()(q, y.unsqueeze(1))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(P.parameters(), 100)
        opt.step()
        return loss

    def run(*b):
        loss = optimize(*b)
        ts, ps = T.state_dict(), P.state_dict()
        for k in ps:
            ts[k] = ps[k] * 0.05 + ts[k] * 0.95
        T.load_state_dict(ts)
        return loss

    g = torch.Generator().manual_seed(1)
    return Training(
        {"P": P, "T": T},
        opt,
        run,
        [
            (
                torch.randn(8, 4, generator=g),
                torch.randint(2, (8, 1), generator=g),
                torch.randn(8, generator=g),
                torch.randn(8, 4, generator=g),
                torch.rand(8, generator=g) < 0.8,
            )
            for _ in range(5)
        ],
    )


@recipe("reinforcement learning", "a recurrent world model")
def rssm(job):
    """GRU cells in a loop, straight-through categories, balanced KL divergence with free nats."""
    cell, prior, post, dec = nn.GRUCell(8 + 2, 8), nn.Linear(8, 8), nn.Linear(8 + 5, 8), nn.Linear(16, 5)
    ps = [p for m in (cell, prior, post, dec) for p in m.parameters()]
    opt = torch.optim.Adam(ps, 1e-2)

    def st(lo):
        p = lo.view(-1, 2, 4).softmax(-1)
        h = F.one_hot(p.argmax(-1), 4).to(p.dtype)
        return (h + p - p.detach()).flatten(1)

    @job
    def step(obs, act):
        B, L, _ = obs.shape
        h = torch.zeros(B, 8)
        z = torch.zeros(B, 8)
        pr, po, rec = [], [], []
        for t in range(L):
            h = cell(torch.cat([z, act[:, t]], -1), h)
            a = prior(h)
            b = post(torch.cat([h, obs[:, t]], -1))
            z = st(b)
            pr.append(a)
            po.append(b)
            rec.append(dec(torch.cat([h, z], -1)))
        pr, po = (torch.stack(u, 1).view(B, L, 2, 4) for u in (pr, po))
        D = torch.distributions

        def cat(lo):
            return D.Independent(D.OneHotCategorical(logits=lo), 1)

        kl = (
            0.8 * D.kl_divergence(cat(po.detach()), cat(pr)).mean()
            + 0.2 * D.kl_divergence(cat(po), cat(pr.detach())).mean()
        )
        kl = torch.max(kl, torch.tensor(0.1))
        loss = F.mse_loss(torch.stack(rec, 1), obs) + kl
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(ps, 100.0)
        opt.step()
        return loss, kl

    g = torch.Generator().manual_seed(1)
    return Training(
        {"cell": cell, "prior": prior, "post": post, "dec": dec},
        opt,
        step,
        [(torch.randn(8, 4, 5, generator=g), torch.randn(8, 4, 2, generator=g)) for _ in range(3)],
    )
