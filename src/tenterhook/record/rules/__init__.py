"""The rules, one file each. `all_rules()` makes a fresh set, for each watches one training and keeps state."""

from tenterhook.record.rule import Rule
from tenterhook.record.rules.bad_batch import BadBatch
from tenterhook.record.rules.batch_norm_mode import BatchNormMode
from tenterhook.record.rules.batch_too_small import BatchTooSmall
from tenterhook.record.rules.batches_of_one_class import BatchesOfOneClass
from tenterhook.record.rules.clipped_always import ClippedAlways
from tenterhook.record.rules.cut_off import CutOff
from tenterhook.record.rules.dead_relu import DeadRelu
from tenterhook.record.rules.dropout_near_one import DropoutNearOne
from tenterhook.record.rules.early_blow_up import EarlyBlowUp
from tenterhook.record.rules.exploding_gradients import ExplodingGradients
from tenterhook.record.rules.gradient_spike import GradientSpike
from tenterhook.record.rules.gradients_not_zeroed import GradientsNotZeroed
from tenterhook.record.rules.headroom import Headroom
from tenterhook.record.rules.initial_loss import InitialLoss
from tenterhook.record.rules.inputs_not_normalised import InputsNotNormalised
from tenterhook.record.rules.learning_rate_gone import LearningRateGone
from tenterhook.record.rules.learning_rate_too_high import LearningRateTooHigh
from tenterhook.record.rules.loss_nan import LossNan
from tenterhook.record.rules.loss_not_falling import LossNotFalling
from tenterhook.record.rules.loss_spike import LossSpike
from tenterhook.record.rules.loss_without_a_floor import LossWithoutAFloor
from tenterhook.record.rules.never_trained import NeverTrained
from tenterhook.record.rules.no_better_than_chance import NoBetterThanChance
from tenterhook.record.rules.non_finite import NonFinite
from tenterhook.record.rules.nothing_trained import NothingTrained
from tenterhook.record.rules.same_batches import SameBatches
from tenterhook.record.rules.saturation import Saturation
from tenterhook.record.rules.scores_are_no_log_probabilities import NoLogProbabilities
from tenterhook.record.rules.softmax_twice import SoftmaxTwice
from tenterhook.record.rules.targets_in_the_inputs import TargetsInTheInputs
from tenterhook.record.rules.two_steps_a_batch import TwoStepsABatch
from tenterhook.record.rules.update_ratio import UpdateRatio
from tenterhook.record.rules.updated_twice import UpdatedTwice
from tenterhook.record.rules.vanishing_gradients import VanishingGradients
from tenterhook.record.rules.variance_drift import VarianceDrift
from tenterhook.record.rules.zero_gradients import ZeroGradients

_ALL: tuple[type, ...] = (
    *(NonFinite, LossNan, ExplodingGradients, VanishingGradients, ZeroGradients, NeverTrained, DeadRelu, Saturation),
    *(UpdateRatio, GradientSpike, LossSpike, LossNotFalling, InitialLoss, VarianceDrift, Headroom, BatchNormMode),
    *(SameBatches, BadBatch, EarlyBlowUp, LossWithoutAFloor, NoBetterThanChance, TargetsInTheInputs),
    *(SoftmaxTwice, NoLogProbabilities, BatchesOfOneClass, LearningRateGone),
    *(LearningRateTooHigh, GradientsNotZeroed, TwoStepsABatch, UpdatedTwice),
    *(DropoutNearOne, ClippedAlways, BatchTooSmall, InputsNotNormalised, CutOff, NothingTrained),
)


def all_rules() -> list[Rule]:
    """One of each, new."""
    return [rule() for rule in _ALL]
