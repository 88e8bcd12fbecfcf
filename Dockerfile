# An image in which the README's two commands work: `make demo`, here on the lazy device, and `make test`.
#
#     docker build --tag stepmark .
#     docker run --rm --shm-size 4g stepmark                    # make demo DEVICE=xla
#     docker run --rm --shm-size 4g stepmark make test
#
# The environment is made when the image is built, with the versions of constraints/, so running needs no network.
FROM python:3.11-bookworm

# Chromium shows reports to the tests; without it those are skipped. /dev/shm holds what data workers pass on.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends chromium iproute2 make \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home stepmark
USER stepmark
WORKDIR /home/stepmark/stepmark

# First what the environment depends on, so that a change of the source does not install it again.
COPY --chown=stepmark Makefile setup.py pyproject.toml README.md LICENSE ./
COPY --chown=stepmark constraints constraints
RUN mkdir -p src/stepmark && touch src/stepmark/__init__.py && make .venv/.installed

COPY --chown=stepmark . .
RUN touch .venv/.installed

CMD ["make", "demo", "DEVICE=xla"]
