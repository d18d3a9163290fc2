"""Reinforcement learning on a CartPole of our own, many carts at once."""

import random
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

from tests.zoo.registry import fault, healthy


class CartPole:
    """As in Gymnasium, for several carts in one array; one that falls begins again."""

    def __init__(self, many: int, seed: int = 0) -> None:
        self.random = np.random.RandomState(seed)
        self.state = self.random.uniform(-0.05, 0.05, (many, 4))
        self.length = np.zeros(many)
        self.finished: deque[float] = deque(maxlen=20)

    def observe(self) -> torch.Tensor:
        return torch.from_numpy(self.state.astype(np.float32))

    def step(self, action: np.ndarray) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        x, v, angle, spin = self.state.T
        force = np.where(action == 1, 10.0, -10.0)
        cos, sin = np.cos(angle), np.sin(angle)
        push = (force + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        speed = push - 0.05 * turn * cos / 1.1
        self.state = np.stack([x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * spin, spin + 0.02 * turn], 1)
        self.length += 1
        fallen = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.2095)
        done = fallen | (self.length >= 500)
        self.finished.extend(self.length[done])
        self.state[done] = self.random.uniform(-0.05, 0.05, (int(done.sum()), 4))
        self.length[done] = 0
        return self.observe(), np.ones(len(x), np.float32), done

    def report(self) -> None:
        print("mean length of an episode", round(float(np.mean(self.finished)), 1))


class ActorCritic(nn.Module):
    """Two branches, as in Stable-Baselines3 and CleanRL; the last layer of the policy begins small."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        for branch, gain in ((self.actor, 0.01), (self.critic, 1.0)):
            for layer in branch[:-1:2]:
                nn.init.orthogonal_(layer.weight, 2**0.5)
                nn.init.zeros_(layer.bias)
            nn.init.orthogonal_(branch[-1].weight, gain)

    def forward(self, observed):
        return Categorical(logits=self.actor(observed)), self.critic(observed).squeeze(-1)


def _returns(rewards, dones, values, last, gamma=0.99, lam=0.95):
    """Advantages as of GAE."""
    advantages, running = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = last if t == len(rewards) - 1 else values[t + 1]
        alive = 1 - dones[t]
        running = rewards[t] + gamma * following * alive - values[t] + gamma * lam * alive * running
        advantages[t] = running
    return advantages


def _collect(envs, agent, steps):
    kept = []
    observed = envs.observe()
    with torch.no_grad():
        for _ in range(steps):
            policy, value = agent(observed)
            action = policy.sample()
            following, reward, done = envs.step(action.numpy())
            done = torch.from_numpy(done.astype(np.float32))
            kept.append((observed, action, policy.log_prob(action), value, torch.from_numpy(reward), done))
            observed = following
        last = agent(observed)[1]
    observations, actions, log_probs, values, rewards, dones = (torch.stack(some) for some in zip(*kept, strict=True))
    advantages = _returns(rewards, dones, values, last)
    return observations, actions, log_probs, advantages, advantages + values


def _ppo(agent, optimizer, updates=25, entropy=0.0, sign=1.0):
    envs = CartPole(8)
    for _ in range(updates):
        some = [one.flatten(0, 1) for one in _collect(envs, agent, 128)]
        for _ in range(4):
            for which in torch.randperm(1024).split(256):
                observed, action, old, advantage, target = (one[which] for one in some)
                policy, value = agent(observed)
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                ratio = (policy.log_prob(action) - old).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                loss = -sign * gain + 0.5 * F.mse_loss(value, target) - entropy * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
    envs.report()
    return agent


@healthy("PPO")
def ppo():
    """PPO as in CleanRL"""
    agent = ActorCritic()
    return _ppo(agent, torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5), entropy=0.01)


@fault("PPO", "learning rate too high")
def ppo_rate_too_high():
    """PPO with learning rate 1"""
    agent = ActorCritic()
    return _ppo(agent, torch.optim.Adam(agent.parameters(), lr=1.0), updates=12)


@fault("PPO", "parameter never trained")
def ppo_without_the_critic():
    """the optimizer has the actor only"""
    agent = ActorCritic()
    return _ppo(agent, torch.optim.Adam(agent.actor.parameters(), lr=1e-3), updates=12)


@healthy("A2C")
def a2c():
    """A2C with RMSprop, as in Stable-Baselines3"""
    envs, agent = CartPole(16), ActorCritic()
    optimizer = torch.optim.RMSprop(agent.parameters(), lr=1e-3, alpha=0.99, eps=1e-5)
    for _ in range(500):
        observed, actions, _, advantages, targets = _collect(envs, agent, 8)
        policy, values = agent(observed)
        policy_loss = -(policy.log_prob(actions) * advantages).mean()
        loss = policy_loss + 0.5 * F.mse_loss(values, targets) - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
    envs.report()
    return agent


@fault("A2C", "cut off from the loss", "parameter never trained")
def a2c_critic_cut_off():
    """the value in the loss is the one that was detached for the advantage"""
    envs, agent = CartPole(16), ActorCritic()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    for _ in range(250):
        observed, actions, _, advantages, targets = _collect(envs, agent, 8)
        policy, values = agent(observed)
        values = values.detach()
        policy_loss = -(policy.log_prob(actions) * advantages).mean()
        loss = policy_loss + 0.5 * F.mse_loss(values, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    envs.report()
    return agent


@healthy("REINFORCE")
def reinforce():
    """the policy gradient of whole episodes, with normalised returns"""
    policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    env = CartPole(1)
    for _ in range(120):
        log_probs, rewards, done, observed = [], [], [False], env.observe()
        while not done[0]:
            choice = Categorical(logits=policy(observed))
            action = choice.sample()
            log_probs.append(choice.log_prob(action))
            observed, reward, done = env.step(action.numpy())
            rewards.append(float(reward[0]))
        returns, running = [], 0.0
        for reward in reversed(rewards):
            running = reward + 0.99 * running
            returns.insert(0, running)
        returns = torch.tensor(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        loss = -(torch.cat(log_probs) * returns).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if len(rewards) == 500:
            break
    env.report()
    return policy


def _dqn(network, target, optimizer, zero=True, steps=6000, copy_each=200):
    env, memory = CartPole(1), deque(maxlen=5000)
    observed = env.observe()
    for step in range(steps):
        epsilon = max(0.05, 1 - step / 1500)
        with torch.no_grad():
            greedy = network(observed).argmax(1).numpy()
        action = np.array([random.randrange(2)]) if random.random() < epsilon else greedy
        following, reward, done = env.step(action)
        memory.append((observed, int(action[0]), float(reward[0]), following, float(done[0])))
        observed = following
        if step >= 500 and step % 2 == 0:
            batch = random.sample(memory, 64)
            states, actions, rewards, nexts, dones = zip(*batch, strict=True)
            with torch.no_grad():
                best = target(torch.cat(nexts)).max(1).values
                goal = torch.tensor(rewards) + 0.99 * best * (1 - torch.tensor(dones))
            value = network(torch.cat(states)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
            loss = F.smooth_l1_loss(value, goal)
            if zero:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % copy_each == 0:
                target.load_state_dict(network.state_dict())
    env.report()
    return [network, target]


@healthy("DQN")
def dqn():
    """DQN with a target network that is copied now and then"""
    network, target = mlp_q(), mlp_q()
    target.load_state_dict(network.state_dict())
    return _dqn(network, target, torch.optim.Adam(network.parameters(), lr=1e-3))


@fault("DQN", "learning rate too high")
def dqn_rate_too_high():
    """DQN with learning rate 1"""
    network, target = mlp_q(), mlp_q()
    target.load_state_dict(network.state_dict())
    return _dqn(network, target, torch.optim.Adam(network.parameters(), lr=1.0), steps=2500)


@fault("DQN", "gradients not zeroed")
def dqn_without_zeroing():
    """DQN that never sets its gradients back"""
    network, target = mlp_q(), mlp_q()
    target.load_state_dict(network.state_dict())
    return _dqn(network, target, torch.optim.Adam(network.parameters(), lr=1e-3), zero=False, steps=2500)


@fault("DQN", "parameter never trained")
def dqn_trains_the_target():
    """the optimizer has the parameters of the target network"""
    network, target = mlp_q(), mlp_q()
    optimizer = torch.optim.Adam(target.parameters(), lr=1e-3)
    return _dqn(network, target, optimizer, steps=2500, copy_each=10**9)


def mlp_q() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


@healthy("TD3")
def actor_and_twin_critics():
    """continuous control in the style of TD3: two critics, an actor, and soft targets"""

    def net(n_in):
        return nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    actor, critics = nn.Sequential(net(2), nn.Tanh()), nn.ModuleList([net(3), net(3)])
    target_actor, target_critics = nn.Sequential(net(2), nn.Tanh()), nn.ModuleList([net(3), net(3)])
    target_actor.load_state_dict(actor.state_dict())
    target_critics.load_state_dict(critics.state_dict())
    opt_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
    opt_critics = torch.optim.Adam(critics.parameters(), lr=1e-3)
    memory, state, total = deque(maxlen=5000), torch.zeros(1, 2), 0.0
    for step in range(1500):
        if step % 50 == 0:  # a point on a line that is to be brought to zero
            state = torch.tensor([[random.uniform(-1, 1), 0.0]])
        with torch.no_grad():
            action = (actor(state) + 0.2 * torch.randn(1, 1)).clamp(-1, 1)
        place, speed = state[0, 0] + 0.1 * state[0, 1], 0.9 * state[0, 1] + 0.3 * action[0, 0]
        following = torch.stack([place, speed])[None]
        reward = -(place**2 + 0.1 * action[0, 0] ** 2)
        total += reward.item() if step >= 1200 else 0.0
        memory.append((state, action, reward[None], following))
        state = following
        if step < 100:
            continue
        s, a, r, n = (torch.cat(some) for some in zip(*random.sample(memory, 64), strict=True))
        with torch.no_grad():
            after = torch.cat([n, target_actor(n)], 1)
            goal = r[:, None] + 0.95 * torch.min(*(critic(after) for critic in target_critics))
        loss = sum(F.mse_loss(critic(torch.cat([s, a], 1)), goal) for critic in critics)
        opt_critics.zero_grad()
        loss.backward()
        opt_critics.step()
        if step % 2 == 0:
            opt_actor.zero_grad()
            (-critics[0](torch.cat([s, actor(s)], 1)).mean()).backward()
            opt_actor.step()
            with torch.no_grad():
                for slow, fast in ((target_actor, actor), (target_critics, critics)):
                    for p, q in zip(slow.parameters(), fast.parameters(), strict=True):
                        p.lerp_(q, 0.01)
    print("reward of the last episodes", total / 6)
    return [actor, critics]
