"""The mathematics of the paper: one function per equation; imports torch and nothing else."""

from pivotpatch.core.bootstrap import Interval as Interval
from pivotpatch.core.bootstrap import resample_average_precision as resample_average_precision
from pivotpatch.core.counterfactual import CounterfactualLogits as CounterfactualLogits
from pivotpatch.core.counterfactual import combine_logits as combine_logits
from pivotpatch.core.counterfactual import patch_weights as patch_weights
from pivotpatch.core.counterfactual import pool_patches as pool_patches
from pivotpatch.core.counterfactual import tde_logits as tde_logits
from pivotpatch.core.losses import AsymmetricLoss as AsymmetricLoss
from pivotpatch.core.losses import BinaryCrossEntropyLoss as BinaryCrossEntropyLoss
from pivotpatch.core.losses import asymmetric_loss as asymmetric_loss
from pivotpatch.core.losses import binary_cross_entropy as binary_cross_entropy
from pivotpatch.core.losses import patch_loss as patch_loss
from pivotpatch.core.metrics import AveragePrecision as AveragePrecision
from pivotpatch.core.metrics import PrecisionRecall as PrecisionRecall
from pivotpatch.core.metrics import average_precision as average_precision
from pivotpatch.core.metrics import precision_recall as precision_recall
from pivotpatch.core.patches import cut_patches as cut_patches
from pivotpatch.core.patches import resize_images as resize_images
from pivotpatch.core.policies import Fixed as Fixed
from pivotpatch.core.policies import PerLabel as PerLabel
from pivotpatch.core.policies import PriorMatched as PriorMatched
from pivotpatch.core.policies import ThresholdPolicy as ThresholdPolicy
from pivotpatch.core.policies import TopK as TopK
