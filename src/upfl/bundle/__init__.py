"""What a trained federation ships to newcomers, and what a newcomer makes of it.

    mine = Bundle.load("bundle").personalize(x)     x: a newcomer's images, without labels
    mine.predict(x), mine.predict_proba(x)          its own model, on these images or on later ones
    mine.save("me"); PersonalModel.load("me")

A bundle is a folder, or a .zip of one. Nothing in it is code, and nothing says on which machine it was made:

    manifest.json           what it is: task, input, model, training, personalizers; for a person and for `load`
    weights.safetensors     the published state (`state.`), what was fitted after training (`fitted.`); in a newcomer's
                            own bundle its parameters (`0.`, one number for each model of an ensemble) and `bias`
    members/N.safetensors   training clients' own layers, only where the method hands them out
    README.md               the model card
    SHA256SUMS              of all these files: `sha256sum -c` checks it, `load` does

`load` reads the files that the manifest asks for and no others, and refuses what does not fit: another schema, a wrong
checksum, tensors of other names, shapes or types than the training needs, numbers that are not finite. Checksums find
damage, they do not tell who made a bundle: take bundles from those you trust.

    manifest    the schema of `manifest.json`
    card        the model card, README.md
    read        from a folder or a .zip, with nothing taken on trust
    write       to a folder or a .zip, in one step
    model       `Bundle` and `PersonalModel`: what a newcomer works with
    publish     from a run, or from a training's state, to a bundle
"""

from upfl.bundle.model import Bundle, ClassMix, Images, PersonalModel, class_mix, load
from upfl.bundle.publish import export, write
from upfl.bundle.write import require_new

__all__ = [
    "Bundle",
    "ClassMix",
    "Images",
    "PersonalModel",
    "class_mix",
    "export",
    "load",
    "require_new",
    "write",
]
