"""Stable-Baselines3's SAC: an actor, two critics and an entropy coefficient, each with an optimizer of its own."""

from digest import digest
from stable_baselines3 import SAC


def main():
    model = SAC(
        "MlpPolicy", "Pendulum-v1", learning_starts=100, policy_kwargs={"net_arch": [32, 32]}, seed=0, device="cpu"
    )
    model.learn(total_timesteps=180)
    print("steps", model._n_updates)
    print("weights", digest(model.policy), model.log_ent_coef.item().hex())


if __name__ == "__main__":
    main()
