// The form for the token. A link that ends in #token=... fills it in: what is behind # is not sent to any server.

const input = /** @type {HTMLInputElement} */ (document.getElementById("token"));
const wrong = /** @type {HTMLElement} */ (document.getElementById("wrong"));
const given = new URLSearchParams(location.hash.slice(1)).get("token");

wrong.hidden = location.hash !== "#wrong";
// Out of the address and the history, for whoever looks over the shoulder or shares the screen.
history.replaceState(null, "", location.pathname);
if (given) {
  input.value = given;
  input.form?.requestSubmit();
}
