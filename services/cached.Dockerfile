# A worker's image with what its workers compile. services/compile-into-image.sh builds it.
ARG IMAGE
FROM ${IMAGE}
COPY --chown=10001:10001 . /opt/millrace/cache
