// Printed, the page shows its tables.
let opened = [];
addEventListener('beforeprint', () => {
  opened = [...document.querySelectorAll('details:not([open])')];
  opened.forEach((each) => { each.open = true; });
});
addEventListener('afterprint', () => opened.forEach((each) => { each.open = false; }));
