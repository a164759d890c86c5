"""No personalization: the model as it is published. The row of every method that only trains."""

from upfl.contract import Diary, Hyper, Personalized, Personalizer, Predictor, Published, Unlabelled
from upfl.personalize.adaptation import entropy
from upfl.state import State


class Nothing(Personalizer[Hyper]):
    name = "none"
    title = "none"

    def personalize(self, published: Published, client: Unlabelled, memory: State | None = None) -> Personalized:
        predictor = Predictor(self.training, [self.training.start(published, client, memory)])
        logits = predictor.logits(client.x)
        diary = Diary(entropy=[entropy(logits).mean().item()], decision="the published model, unchanged")
        return Personalized(logits, logits, predictor, diary)
