"""Stable-Baselines3's quick start: PPO plays CartPole."""

from digest import digest
from stable_baselines3 import PPO


def main():
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=256, batch_size=64, n_epochs=4, seed=0, device="cpu")
    model.learn(total_timesteps=1024)
    env = model.get_env()
    obs = env.reset()
    for _ in range(20):
        action, _states = model.predict(obs, deterministic=True)
        obs, _rewards, _dones, _info = env.step(action)
    print("observed", obs.tolist())
    print("steps", 1024 // 64 * 4)
    print("weights", digest(model.policy))


if __name__ == "__main__":
    main()
