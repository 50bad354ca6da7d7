# In a guest: an address and soft-RoCE on its network card. network.sh ADDRESS
set -e
ip link set eth0 mtu 9000
ip address add "$1/24" dev eth0
ip link set eth0 up
rdma link add rxe0 type rxe netdev eth0
# NIXL's libibverbs looks here first, for providers that were not made for it; its own is named by IBV_DRIVERS.
rm -rf /etc/libibverbs.d
