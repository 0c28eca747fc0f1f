# docker build -t aedit . && docker run --rm -it --init -v "$PWD/runs:/aedit/runs" aedit run configs/tiny.toml --local 3
FROM python:3.11-slim
WORKDIR /aedit
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# The dependencies alone first: a change of the code then downloads nothing.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > requirements.txt \
    && pip install -c constraints.txt pip setuptools -r requirements.txt \
    && rm requirements.txt

COPY . .
RUN pip install -c constraints.txt --no-build-isolation ".[datasets,tensorboard]"

ENTRYPOINT ["aedit"]
CMD ["--help"]
