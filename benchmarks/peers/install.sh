#!/usr/bin/env bash
# Make the environments of other libraries in .peers.
#
#     benchmarks/peers/install.sh [flower] [fedjax] [drjax] [pfl] [blazefl] [fluke] [nvflare]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
torch=(torch==2.14.1 numpy==2.4.6)

install() {  # NAME, and what pip shall install
    local folder=${LIGHTNING_FL_PEERS:-.peers}/$1
    [[ -x $folder/bin/python ]] || python -m venv "$folder"
    "$folder/bin/pip" install "${@:2}"
}

peers=("$@")
[[ $# -gt 0 ]] || peers=(flower fedjax drjax pfl blazefl fluke nvflare)
for peer in "${peers[@]}"; do
    case $peer in
        flower) install flower "flwr[simulation]==1.41.0" ray==2.55.1 "${torch[@]}" ;;
        fedjax) install fedjax fedjax==0.0.17 jax==0.5.3 jaxlib==0.5.3 dm-haiku==0.0.17 \
            optax==0.2.8 numpy==2.4.6 scipy==1.17.1 ;;
        drjax) install drjax drjax==0.2.1 jax==0.10.2 jaxlib==0.10.2 dm-haiku==0.0.17 \
            optax==0.2.8 numpy==2.4.6 scipy==1.17.1 ;;
        pfl) install pfl pfl==0.6.0 "${torch[@]}" ;;
        blazefl)
            install blazefl "${torch[@]}" tqdm
            # Its releases for this Python are pure Python, but ask for a newer one.
            install blazefl --no-deps --ignore-requires-python blazefl==2.0.3 ;;
        fluke) install fluke fluke-fl==0.8.1 "${torch[@]}" ;;
        nvflare) install nvflare nvflare==2.9.0 "${torch[@]}" ;;
        *) echo "unknown: $peer; choose flower, fedjax, drjax, pfl, blazefl, fluke or nvflare" >&2; exit 2 ;;
    esac
done
