"""The contracts between the kernel and its plugins: few verbs over plain data, in a module per kind of plugin.

No Ray handle, process group or tokenizer object appears in a signature, and an object that exists is ready: there
is no ``setup()`` to forget. ``nemorl_testing`` holds a conformance check for every clause stated here.
"""

from nemorl.contracts.data import DataModule as DataModule
from nemorl.contracts.data import DataSource as DataSource
from nemorl.contracts.data import Fingerprinted as Fingerprinted
from nemorl.contracts.data import HeldOut as HeldOut
from nemorl.contracts.data import SizedDataModule as SizedDataModule
from nemorl.contracts.data import Table as Table
from nemorl.contracts.display import Display as Display
from nemorl.contracts.display import Logger as Logger
from nemorl.contracts.environment import Environment as Environment
from nemorl.contracts.environment import Episode as Episode
from nemorl.contracts.generation import GenerationBackend as GenerationBackend
from nemorl.contracts.generation import GenerationCapability as GenerationCapability
from nemorl.contracts.generation import HoldsVersions as HoldsVersions
from nemorl.contracts.generation import ObservableSampler as ObservableSampler
from nemorl.contracts.generation import ProvingBackend as ProvingBackend
from nemorl.contracts.generation import ReportingSampler as ReportingSampler
from nemorl.contracts.generation import RequestBackend as RequestBackend
from nemorl.contracts.memory import OffloadingBackend as OffloadingBackend
from nemorl.contracts.memory import SleepingBackend as SleepingBackend
from nemorl.contracts.training import AdamStep as AdamStep
from nemorl.contracts.training import AdaptedModules as AdaptedModules
from nemorl.contracts.training import AdapterBackend as AdapterBackend
from nemorl.contracts.training import AdapterShape as AdapterShape
from nemorl.contracts.training import HalvedSteps as HalvedSteps
from nemorl.contracts.training import Head as Head
from nemorl.contracts.training import Loss as Loss
from nemorl.contracts.training import MomentsBackend as MomentsBackend
from nemorl.contracts.training import ObservableTrainer as ObservableTrainer
from nemorl.contracts.training import PublishesPieces as PublishesPieces
from nemorl.contracts.training import RateScalingBackend as RateScalingBackend
from nemorl.contracts.training import RemarkingBackend as RemarkingBackend
from nemorl.contracts.training import SelectiveLoss as SelectiveLoss
from nemorl.contracts.training import SharedBase as SharedBase
from nemorl.contracts.training import SnapshottingBackend as SnapshottingBackend
from nemorl.contracts.training import TrainingBackend as TrainingBackend
from nemorl.contracts.training import TrainingCapability as TrainingCapability
from nemorl.contracts.training import WeightsName as WeightsName
from nemorl.contracts.workers import WeightTransport as WeightTransport
from nemorl.contracts.workers import WorkerGroup as WorkerGroup
